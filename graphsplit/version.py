"""The version of graphsplit, and what is said where versions differ."""

__version__ = "0.1.0"


def different_versions(name: str, who: str, mine: str, other: str, theirs: str) -> str:
    """That two of a job have different versions of something, and the fix."""
    return (
        f"{who} has {name} {mine or 'none'}, but {other} has {name} {theirs or 'none'}\n"
        f"  Fix: install the same version of {name} for every worker"
    )
