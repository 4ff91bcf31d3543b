"""Messages about this process's limit on open files: one before it is reached, and one when no descriptor is left."""

import errno
import resource

FEW = 256
"""A learner needs about 40 descriptors, and 2 for each generator. The other roles need fewer."""


def few_descriptors() -> str:
    """Return a warning if this process may open fewer than ``FEW`` files, and an empty text otherwise."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= FEW:
        return ""
    return (
        f"expected a limit of at least {FEW} open files, got {hard}: that is enough for a few generators only; raise "
        f"it (ulimit -Hn {FEW}, or LimitNOFILE in systemd)"
    )


def out_of_descriptors(error: Exception) -> str:
    """Return the message of a process that ends because of ``error``, whose ``errno`` is EMFILE or ENFILE."""
    filename = getattr(error, "filename", None)
    where = f" for {filename}" if filename else ""
    if getattr(error, "errno", None) == errno.ENFILE:
        return f"no file descriptor is left on this machine{where}; raise fs.file-max, then give the same command again"
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"expected a free file descriptor{where}, but all {soft} of this process are in use; raise the limit on open "
        f"files (ulimit -n), then give the same command again"
    )
