"""Real text without a download: the documentation inside the user's own Python, the same for a given version."""

import inspect
import pkgutil
import re
from dataclasses import dataclass
from functools import cache

# Few enough for a small model to learn in half a minute. Importing them has no effect but the import.
HOMES = (
    "builtins.str", "builtins.list", "builtins.set", "builtins.dict", "math", "os.path", "random", "socket",
    "statistics", "threading",
)  # fmt: skip
SHORTEST, LONGEST = 20, 120  # characters of a description


@dataclass(frozen=True)
class Doc:
    """A documented function or method: what holds it, its name with that, its signature, its first sentence."""

    home: str
    name: str
    signature: str
    text: str


@cache
def docs():
    """Every :class:`Doc` of the modules and classes above, in their order; no two of the same text."""
    found = {}
    for path in HOMES:
        holder, home = pkgutil.resolve_name(path), path.removeprefix("builtins.")
        for attribute in sorted(vars(holder)):
            private = attribute.startswith("_") or attribute.endswith("hook")  # programs replace hooks: pytest does
            doc = None if private else _doc(home, attribute, getattr(holder, attribute))
            if doc:
                found.setdefault(doc.text, doc)
    return list(found.values())


def _doc(home, attribute, thing):
    if not inspect.isroutine(thing) or not inspect.getdoc(thing):
        return None
    text = _sentence(inspect.getdoc(thing))
    if not SHORTEST <= len(text) <= LONGEST:
        return None
    name = f"{home}.{attribute}"
    return Doc(home, name, name + _signature(thing), text)


def _sentence(text):
    """The first sentence of a docstring on one line; empty if that is no sentence (a signature, an address)."""
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text)]
    prose = next((p for p in paragraphs if not re.match(r"[\w.]+\(", p)), "")  # after the signature, if there is one
    sentence = re.split(r"(?<=[.!?]) |:$", prose)[0].rstrip(".")
    return sentence + "." if re.match(r"[A-Z][\w'-]* .*\w", sentence) and "0x" not in sentence else ""


def _signature(thing):
    """``(a, b=1)``, or ``()`` where Python knows none."""
    try:
        text = str(inspect.signature(thing))
    except (ValueError, TypeError):
        return "()"
    return text if "0x" not in text and len(text) <= LONGEST else "(...)"  # 0x: a default that prints its address


@cache
def topics():
    """``{topic: text}``: Python's language reference as ``help()`` shows it."""
    from pydoc_data.topics import topics

    return dict(sorted(topics.items()))
