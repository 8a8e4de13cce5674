"""Formats of whole tables, of penstock and of other libraries: one module each, with an object FORMAT."""
