"""An application that fails if its Spark Connect server has a version of Spark that does not fit the installed
version."""

from airflow_pgchange.spark import session

if __name__ == "__main__":
    session.opened()
