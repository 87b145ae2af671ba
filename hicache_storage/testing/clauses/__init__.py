"""The clauses, section by section. CLAUSES is the whole list, by number."""

from ..clause import registered
from . import answers, buffers, keys, lifetime, optional, pages, pairs

SECTIONS = {
    1: "Answers",
    2: "Whole pages",
    3: "The leading run",
    4: "Damaged pages",
    5: "Buffers",
    6: "Keys and namespaces",
    7: "Threads and processes",
    8: "Optional hooks and capacity",
    9: "Opening and closing",
    10: "Secrets",
    11: "Target and draft in pairs",
}
CLAUSES = registered()

__all__ = [
    "CLAUSES",
    "SECTIONS",
    "answers",
    "buffers",
    "keys",
    "lifetime",
    "optional",
    "pages",
    "pairs",
]
