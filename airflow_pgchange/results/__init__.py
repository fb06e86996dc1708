"""Results on their way into their tables: staged while a batch is processed, merged when it commits. psycopg only."""
