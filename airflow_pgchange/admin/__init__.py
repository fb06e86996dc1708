"""What people and schedules do with a database of feeds: install, look, mend, keep house. psycopg only, no Airflow."""
