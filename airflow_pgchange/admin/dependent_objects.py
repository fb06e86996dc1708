"""Find objects of others that ``drop schema ... cascade`` would drop together with a schema of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from airflow_pgchange.admin.versions import SEALED, STAGING
from airflow_pgchange.feeds.queries import ask, rows

_INSIDE = """
    select distinct i.type || ' ' || i.identity
    from pg_catalog.pg_depend as d
    left join pg_catalog.pg_depend as e on (e.classid, e.objid, e.deptype) = (d.classid, d.objid, 'e')
    cross join lateral pg_catalog.pg_identify_object(
        coalesce(e.refclassid, d.classid), coalesce(e.refobjid, d.objid), 0) as i
    where d.refclassid = 'pg_catalog.pg_namespace'::regclass and d.refobjid = %(name)s::text::regnamespace
      and d.deptype = 'n' and (i.type = 'extension' or not exists (
          select from pg_catalog.pg_description as c
          where (c.classoid, c.objoid, c.objsubid) = (d.classid, d.objid, 0) and c.description like %(ours)s
          union all
          select from pg_catalog.pg_depend as p
          join pg_catalog.pg_description as c on (c.classoid, c.objoid, c.objsubid) = (p.refclassid, p.refobjid, 0)
          where (p.classid, p.objid) = (d.classid, d.objid) and p.deptype in ('a', 'i') and c.description like %(ours)s))
"""
_OUTSIDE = """
    with recursive reached(classid, objid, objsubid, is_inside) as (
        select d.classid, d.objid, 0, true
        from pg_catalog.pg_depend as d
        where d.refclassid = 'pg_catalog.pg_namespace'::regclass and d.refobjid = %(name)s::text::regnamespace
          and d.deptype = 'n'
          and not exists (
              select from pg_catalog.pg_depend as e
              where (e.classid, e.objid, e.deptype) = (d.classid, d.objid, 'e'))
        union
        select d.classid, d.objid, d.objsubid,
               d.deptype = 'i'
                   or coalesce(coalesce(i.schema, a.object_names[1]) = any (%(ours)s::text[] || 'pg_toast'::text), false)
        from reached as r
        join pg_catalog.pg_depend as d on (d.refclassid, d.refobjid) = (r.classid, r.objid) and d.deptype <> 'e'
        cross join lateral pg_catalog.pg_identify_object(d.classid, d.objid, d.objsubid) as i
        cross join lateral pg_catalog.pg_identify_object_as_address(d.classid, d.objid, d.objsubid) as a
        where r.is_inside
    )
    select distinct i.type || ' ' || i.identity
    from reached as r
    left join pg_catalog.pg_rewrite as v on (r.classid, r.objid) = ('pg_catalog.pg_rewrite'::regclass, v.oid)
    cross join lateral pg_catalog.pg_identify_object(
        case when v.oid is null then r.classid else 'pg_catalog.pg_class'::regclass end, coalesce(v.ev_class, r.objid),
        r.objsubid) as i
    where not r.is_inside
"""


def strangers(connection: psycopg.Connection[Any], schema: str, beside: Sequence[str] = ()) -> list[str]:
    """Return the names of foreign objects inside a schema of ours, and of objects elsewhere that depend on the schema.

    ``beside`` are schemas that are dropped with it; their objects are ours too.

    Each object of ours has a comment, or is a part of an object with a comment, such as a partition or a sequence. Staged
    tables have a special comment. An extension is named instead of its objects. If a restore has left out the comments,
    objects inside the schema cannot be told apart, and none of them is returned.
    """
    names = {name for (name,) in rows(connection, _OUTSIDE, {"name": schema, "ours": [schema, *beside]})}
    main_schema = schema.removesuffix(SEALED)
    has_comments = "select pg_catalog.obj_description(pg_catalog.to_regclass(%s), 'pg_class') is not null"
    our_comment, commented = "%", f"{main_schema}.installed"
    if schema == STAGING:
        has_comments = (
            "select pg_catalog.obj_description(pg_catalog.to_regnamespace(%s), 'pg_namespace') is not null"
        )
        our_comment, commented = "pgchange {%", schema
    if ask(connection, has_comments, [commented]):
        names |= {name for (name,) in rows(connection, _INSIDE, {"name": schema, "ours": our_comment})}
    return sorted(names)
