"""The documentation as a site: `make docs` builds it, and `make pictures` draws its pictures."""
