"""The catalog of a database as texts: each object, its definition, its rights and its comment. Two databases of the same
version have the same texts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import psycopg

Connection = psycopg.Connection[Any]

SCHEMAS = "n.nspname !~ '^pg_' and n.nspname <> 'information_schema'"
OURS = (
    "not exists (select from pg_depend as dep where dep.objid = {oid} and dep.classid = {catalog}::regclass "
    "and dep.deptype = 'e')"
)
RIGHTS = (
    "(select string_agg(format('%s=%s%s', coalesce(r.rolname, 'public'), a.privilege_type, "
    "case when a.is_grantable then '*' end), ' ' order by r.rolname nulls first, a.privilege_type) "
    "from aclexplode(coalesce({acl}, acldefault('{kind}', {owner}))) as a left join pg_roles as r on r.oid = a.grantee)"
)

OBJECTS = {
    "schema": """
        select n.nspname, '', {acl}, obj_description(n.oid, 'pg_namespace')
        from pg_namespace as n where {schemas} and {extension}""",
    "function": """
        select p.oid::regprocedure::text, pg_get_functiondef(p.oid), {acl}, obj_description(p.oid, 'pg_proc')
        from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace
        where {schemas} and {extension} and p.prokind in ('f', 'p')""",
    "table": """
        select c.oid::regclass::text,
               concat_ws(' ', c.relkind, c.relpersistence, c.relreplident, c.relrowsecurity, c.relforcerowsecurity,
                         c.reloptions, pg_get_partkeydef(c.oid), pg_get_expr(c.relpartbound, c.oid), c.reloftype::regtype,
                         array(select i.inhparent::regclass from pg_inherits as i where i.inhrelid = c.oid),
                         case when c.relkind in ('v', 'm') then pg_get_viewdef(c.oid) end),
               {acl}, obj_description(c.oid, 'pg_class')
        from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
        where {schemas} and {extension} and c.relkind not in ('i', 'I', 'S', 't')""",
    "sequence": """
        select c.oid::regclass::text,
               concat_ws(' ', s.seqtypid::regtype, s.seqstart, s.seqincrement, s.seqmax, s.seqmin, s.seqcache, s.seqcycle,
                         c.relpersistence),
               {acl}, obj_description(c.oid, 'pg_class')
        from pg_sequence as s join pg_class as c on c.oid = s.seqrelid join pg_namespace as n on n.oid = c.relnamespace
        where {schemas} and {extension}""",
    "column": """
        select format('%s.%I', c.oid::regclass, a.attname),
               concat_ws(' ', row_number() over (partition by c.oid order by a.attnum),
                         format_type(a.atttypid, a.atttypmod),
                         case when a.attnotnull then 'not null' end, a.attidentity, a.attgenerated,
                         pg_get_expr(d.adbin, d.adrelid), a.attcollation::regcollation, a.attstorage, a.attcompression,
                         a.attoptions),
               {acl}, col_description(c.oid, a.attnum)
        from pg_attribute as a join pg_class as c on c.oid = a.attrelid join pg_namespace as n on n.oid = c.relnamespace
        left join pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
        where {schemas} and {extension} and a.attnum > 0 and not a.attisdropped and c.relkind in ('r', 'p', 'v', 'c')""",
    "index": """
        select i.indexrelid::regclass::text,
               concat_ws(' ', pg_get_indexdef(i.indexrelid), i.indisvalid, i.indisreplident, c.reloptions),
               null, obj_description(c.oid, 'pg_class')
        from pg_index as i join pg_class as c on c.oid = i.indexrelid join pg_namespace as n on n.oid = c.relnamespace
        where {schemas} and {extension}""",
    "constraint": """
        select format('%s on %s', m.conname, coalesce(nullif(m.conrelid, 0)::regclass::text, m.contypid::regtype::text)),
               concat_ws(' ', pg_get_constraintdef(m.oid), m.convalidated), null, obj_description(m.oid, 'pg_constraint')
        from pg_constraint as m join pg_namespace as n on n.oid = m.connamespace
        where {schemas} and {extension} and m.contype <> 'n'""",
    "trigger": """
        select format('%s on %s', t.tgname, c.oid::regclass), concat_ws(' ', pg_get_triggerdef(t.oid), t.tgenabled),
               null, obj_description(t.oid, 'pg_trigger')
        from pg_trigger as t join pg_class as c on c.oid = t.tgrelid join pg_namespace as n on n.oid = c.relnamespace
        where {schemas} and {extension} and not t.tgisinternal""",
    "event trigger": """
        select e.evtname::text, concat_ws(' ', e.evtevent, e.evtenabled, e.evtfoid::regprocedure, e.evttags),
               null, obj_description(e.oid, 'pg_event_trigger')
        from pg_event_trigger as e where {extension}""",
    "policy": """
        select format('%s on %s', p.polname, c.oid::regclass),
               concat_ws(' ', p.polcmd, p.polpermissive, p.polroles::regrole[], pg_get_expr(p.polqual, c.oid),
                         pg_get_expr(p.polwithcheck, c.oid)),
               null, obj_description(p.oid, 'pg_policy')
        from pg_policy as p join pg_class as c on c.oid = p.polrelid join pg_namespace as n on n.oid = c.relnamespace
        where {schemas}""",
    "type": """
        select t.oid::regtype::text,
               concat_ws(' ', t.typtype, nullif(t.typbasetype, 0)::regtype, t.typnotnull, t.typdefault,
                         array(select l.enumlabel from pg_enum as l where l.enumtypid = t.oid order by l.enumsortorder)),
               {acl}, obj_description(t.oid, 'pg_type')
        from pg_type as t join pg_namespace as n on n.oid = t.typnamespace
        where {schemas} and {extension} and t.typcategory <> 'A'""",
    "statistics": """
        select s.stxname::text, pg_get_statisticsobjdef(s.oid), null, obj_description(s.oid, 'pg_statistic_ext')
        from pg_statistic_ext as s join pg_namespace as n on n.oid = s.stxnamespace where {schemas}""",
}
"""For each kind of object, a query for its names, definitions, rights and comments."""
ACLS = {
    "schema": ("n.oid", "pg_namespace", "n.nspacl", "n", "n.nspowner"),
    "function": ("p.oid", "pg_proc", "p.proacl", "f", "p.proowner"),
    "table": ("c.oid", "pg_class", "c.relacl", "r", "c.relowner"),
    "sequence": ("c.oid", "pg_class", "c.relacl", "s", "c.relowner"),
    "column": ("c.oid", "pg_class", "a.attacl", "c", "c.relowner"),
    "index": ("c.oid", "pg_class", "null", "c", "0"),
    "constraint": ("m.oid", "pg_constraint", "null", "c", "0"),
    "trigger": ("t.oid", "pg_trigger", "null", "c", "0"),
    "event trigger": ("e.oid", "pg_event_trigger", "null", "c", "0"),
    "policy": ("p.oid", "pg_policy", "null", "c", "0"),
    "type": ("t.oid", "pg_type", "t.typacl", "T", "t.typowner"),
    "statistics": ("s.oid", "pg_statistic_ext", "null", "c", "0"),
}
DECLARED = {
    "pgchange.registered": "kind",
    "pgchange.offered": "trait, name",
    "pgchange.hook": "trait, name",
    "pgchange.given": "schema, signature",
    "pgchange.promised": "schema, name",
    "pgmb.config": "id",
}
"""Tables whose rows come with the schemas, and their keys. An upgrade has to bring these rows, too."""
PARTITION = re.compile(r"\b(?:events|dispatched|commit_queue|queue)_\d+")
"""Partitions, whose names and bounds depend on the time and on transaction ids."""
OID = re.compile(r"(?<=[_'])[0-9a-f]{12}\b|\b\d{5,}\b")
"""Numbers of objects, and their hashes, in the names and bodies of functions that capture a table."""


def objects(connection: Connection) -> dict[str, str]:
    """Return the text of each object of the database, except of extensions and partitions, by its kind and name."""
    texts: defaultdict[str, list[str]] = defaultdict(list)
    # With an empty path, all names in the definitions are qualified.
    with connection.transaction(force_rollback=True):
        connection.execute("set local search_path = ''")
        for kind, name, text in _rows(connection):
            if not PARTITION.search(name):
                is_capture = "public." in name
                described = OID.sub("#", text) if is_capture else text
                texts[f"{kind} {OID.sub('#', name) if is_capture else name}"].append(described)
    return {name: "\n".join(sorted(found)) for name, found in texts.items()}


def _rows(connection: Connection) -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the name and the text of each object."""
    # The names of the roles of queues have the name of the database.
    roles = f"mbus_{connection.info.dbname}_"
    for kind, query in OBJECTS.items():
        oid, catalog, acl, letter, owner = ACLS[kind]
        rights = "null" if acl == "null" else RIGHTS.format(acl=acl, kind=letter, owner=owner)
        extension = OURS.format(oid=oid, catalog=f"'{catalog}'")
        text = query.format(schemas=SCHEMAS, extension=extension, acl=rights)
        for name, *parts in connection.execute(text).fetchall():  # type: ignore[call-overload]
            yield kind, name, "\n".join(map(str, parts)).replace(roles, "mbus_")
    for table, key in DECLARED.items():
        if connection.execute("select to_regclass(%s) is not null", [table]).fetchone() == (True,):
            query = f"select concat_ws(' ', {key}), t::text from {table} as t"
            for name, row in connection.execute(query).fetchall():  # type: ignore[call-overload]
                yield f"row of {table}", name, row


def differences(upgraded: dict[str, str], new: dict[str, str]) -> list[str]:
    """Return the names of the objects that differ, each with the way in which it does."""
    missing = [f"missing: {name}" for name in new.keys() - upgraded.keys()]
    left = [f"left over: {name}" for name in upgraded.keys() - new.keys()]
    changed = [f"different: {name}" for name in new.keys() & upgraded.keys() if new[name] != upgraded[name]]
    return sorted(missing) + sorted(left) + sorted(changed)
