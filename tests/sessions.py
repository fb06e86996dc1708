"""Settings that change the result of an expression in a session."""

from __future__ import annotations

SPEAKING = {
    "default_text_search_config = 'simple'": "pg_catalog.to_tsvector({}) @@ pg_catalog.to_tsquery('run')",
    "array_nulls = off": "((('{{' || left({}, 0) || 'NULL}}')::text[])[1] is null)",
    "quote_all_identifiers = on": "(quote_ident({}) = 'running')",
    "bytea_output = 'escape'": "({}::bytea::text like '\\\\x%')",
    "extra_float_digits = -10": "((length({}) / 3::float8)::text = '2.3333333333333335')",
    "backslash_quote = off": "({} <> E'\\'')",
    "intervalstyle = 'iso_8601'": "((left({}, 0) || '1 day')::interval::text = '1 day')",
}
"""By setting: a condition on a text.

The condition is true for the text 'running' unless the session has changed the setting.
"""
