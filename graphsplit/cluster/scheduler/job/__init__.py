"""The job as its scheduler knows it. Values, and no rules about what comes next."""
