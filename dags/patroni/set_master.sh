#!/usr/bin/env bash
# A callback of Patroni: records in a cluster's catalogue that this instance is the master of its replicaset now.
#
# Give it the connection string of the catalogue, and the name that this instance has there. Patroni appends the event, the
# role and its own cluster's name (`scope`), which is to be the name of the replicaset. In patroni.yml:
#
#   postgresql:
#     callbacks:
#       on_start: /etc/patroni/set_master.sh "service=catalogue" i1
#       on_role_change: /etc/patroni/set_master.sh "service=catalogue" i1
#
# Patroni ignores the exit code and does not call again, so the script itself tries again until the catalogue has taken the
# call: TRIES times (60), with a PAUSE of 5 seconds. If the role changes meanwhile, Patroni ends the script before it starts the next callback.
set -uo pipefail

if (($# != 5)); then
    echo "usage: set_master.sh <catalogue> <instance> <event> <role> <replicaset>" >&2
    exit 2
fi
catalogue=$1 instance=$2 event=$3 role=$4 replicaset=$5

case $event:$role in
    # Before version 4, Patroni called a primary "master".
    on_start:primary | on_role_change:primary | on_start:master | on_role_change:master) ;;
    *) exit 0 ;;
esac

for ((try = 1; try <= ${TRIES:-60}; try++)); do
    if PGCONNECT_TIMEOUT=5 timeout 30 psql --no-psqlrc --quiet --no-password --output=/dev/null --dbname="$catalogue" \
        --set=ON_ERROR_STOP=1 --set=replicaset="$replicaset" --set=instance="$instance" \
        <<< "select topology.set_master(:'replicaset', :'instance')"; then
        echo "set_master.sh: $instance is recorded as the master of replicaset $replicaset"
        exit 0
    fi
    sleep "${PAUSE:-5}"
done
echo "set_master.sh: $instance is the master of replicaset $replicaset, but the catalogue has not recorded it:" \
    "call topology.set_master() by hand" >&2
exit 1
