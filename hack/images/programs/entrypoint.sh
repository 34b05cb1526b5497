#!/bin/sh
# Says what it was started with, then waits to be told to stop.
echo "uid=$(id -u) gid=$(id -g) cwd=$PWD greeting=$GREETING arguments=$*"
trap 'echo stopping; exit 0' TERM INT
while :; do
    sleep 3600 &
    wait $!
done
