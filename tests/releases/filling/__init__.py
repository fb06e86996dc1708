"""Fill a new database with work in flight of every feed, for the tests of upgrades.

``python -m filling populate CONNINFO`` needs only the package, so that it runs beside any release. A kept release has a
copy.
"""
