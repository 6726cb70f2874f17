#!/usr/bin/env bash
# Trains MODEL on rows of GSM8K: several turns with a code interpreter, on Ray, sharded.  run.sh MODEL [key=value …]
set -eu
model=$(realpath "$1")
exec etude train --config-path "$(dirname "$0")" --config-name agent actor_rollout_ref.model.path="$model" "${@:2}"
