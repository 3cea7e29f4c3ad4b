"""How ranks reach each other: one contract (`base`), and the ways to keep it."""
