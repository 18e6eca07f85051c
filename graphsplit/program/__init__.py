"""Workers' programs: readable instructions."""
