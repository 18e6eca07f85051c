"""Operations of the script on workers that do not have their values."""
