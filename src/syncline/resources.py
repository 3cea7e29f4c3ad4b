"""What a machine can refuse a process: space, descriptors, memory. Each in one line with a way out.

No torch here: the command line explains errors before it has loaded anything.
"""

from __future__ import annotations

import errno
import re
import resource

_WAYS_OUT = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some space, or ask for a larger quota",
    errno.EROFS: "Make the file system writable again",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f)",
}
_MEMORY = "Use fewer ranks on a machine, a smaller batch or a smaller model."
# How torch says that an allocation failed: it raises a plain RuntimeError.
_TORCH_SAYS = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


def reason(error: OSError) -> str:
    """Return what the system said, in lower case: "no space left on device"."""
    return (error.strerror or str(error) or type(error).__name__).lower()


def way_out(error: OSError) -> str | None:
    """Return what to do about a file that cannot be written; None if that is not known."""
    return _WAYS_OUT.get(error.errno or 0)


def why_not_written(error: OSError) -> str:
    """Return why a file cannot be written, and the way out, to follow the file's name."""
    fix = way_out(error) or "Look at the folder"
    return f"cannot be written ({reason(error)}). {fix}; what was written before stays."


def explain(error: BaseException) -> str | None:
    """Return a line about what the machine refused, with the way out; None for other errors."""
    if isinstance(error, MemoryError):
        return f"memory was refused. {_MEMORY}"
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _TORCH_SAYS):
        found = re.search(r"allocate (\d+) bytes", str(error))
        size = f" ({int(found[1]) / 1e9:.1f} GB at once)" if found else ""
        return f"memory was refused{size}. {_MEMORY}"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "no thread can be started. Raise the limits (ulimit -u, ulimit -v)."
    if not isinstance(error, OSError):
        return None
    what = f"{error.filename}: " if error.filename else ""
    match error.errno:
        case errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"{what}too many open files: a process may have {limit}. "
                "Raise the limit (ulimit -n 4096), or use fewer ranks on a machine."
            )
        case errno.ENFILE:
            return f"{what}the machine has too many open files. End other programs."
        case errno.ENOMEM:
            return f"{what}memory was refused. {_MEMORY}"
    if way_out(error):
        return f"{what}{why_not_written(error)}"
    return None
