"""An application that fails if the Spark of its Spark Connect server does not fit the one that is installed here."""

from airflow_pgchange.spark import session

if __name__ == "__main__":
    session.opened()
