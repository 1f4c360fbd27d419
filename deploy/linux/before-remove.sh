#!/bin/sh
# Before the package is removed; not before an update, after which after-install.sh restarts the server.
set -eu
case "${1:-}" in
    remove | 0)
        if [ -d /run/systemd/system ]; then
            systemctl disable --now metal-attention.service
        fi
        ;;
esac
