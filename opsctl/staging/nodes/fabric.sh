#!/bin/bash
# fabric.sh up|down PREFIX COUNT: a bridge (10.77.0.1/24 in namespace PREFIX-ctl) and PREFIX-1..PREFIX-COUNT behind it
# at 10.77.0.11 and up. No uplink; the host's own network is not touched. A partition of node 2:
#   ip -n PREFIX-ctl link set v2 down
set -e

PREFIX=$2 COUNT=$3
case $1 in
up)
  ip netns add "$PREFIX-ctl"
  ip -n "$PREFIX-ctl" link set lo up
  ip -n "$PREFIX-ctl" link add br0 type bridge
  ip -n "$PREFIX-ctl" addr add 10.77.0.1/24 dev br0
  ip -n "$PREFIX-ctl" link set br0 up
  for i in $(seq "$COUNT"); do
    ip netns add "$PREFIX-$i"
    ip -n "$PREFIX-$i" link set lo up
    ip -n "$PREFIX-ctl" link add "v$i" type veth peer name eth0 netns "$PREFIX-$i"
    ip -n "$PREFIX-ctl" link set "v$i" master br0 up
    ip -n "$PREFIX-$i" addr add "10.77.0.$((10 + i))/24" dev eth0
    ip -n "$PREFIX-$i" link set eth0 up
  done
  ;;
down)
  for i in $(seq "$COUNT"); do ip netns del "$PREFIX-$i" || true; done
  ip netns del "$PREFIX-ctl" || true
  ;;
esac
