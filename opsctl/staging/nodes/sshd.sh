#!/bin/bash
# sshd.sh ROOT NAME, as NODES_HOOK: an OpenSSH server with key login at boot. $NODES_KEY.pub is let in as root.
set -e

ROOT=$1 NAME=$2
rm -f "$ROOT"/etc/ssh/ssh_host_*
ssh-keygen -q -t ed25519 -N '' -C "$NAME" -f "$ROOT/etc/ssh/ssh_host_ed25519_key"
install -m 644 -o root -g root "$NODES_KEY.pub" "$ROOT/etc/ssh/authorized_keys_test"
mkdir -p "$ROOT/etc/ssh/sshd_config.d" "$ROOT/etc/systemd/system/node.target.wants"
cat >"$ROOT/etc/ssh/sshd_config.d/00-node.conf" <<'CONFIG'
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile /etc/ssh/authorized_keys_test
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
MaxStartups 100
CONFIG
# Without PAM sshd lets nobody in whose account is locked, as root's is on many machines. This is the node's own copy.
others=$(grep -v '^root:' "$ROOT/etc/shadow" || true)
printf 'root:*:19000:0:99999:7:::\n%s\n' "$others" >"$ROOT/etc/shadow"
rm -f "$ROOT"/root/.bashrc "$ROOT"/root/.profile "$ROOT"/root/.bash_profile # bash run by sshd reads .bashrc
ln -sf /lib/systemd/system/ssh.service "$ROOT/etc/systemd/system/node.target.wants/ssh.service"
