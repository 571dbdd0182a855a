#!/usr/bin/env bash
# From rows to an exported adapter, with the commands a user would type. Usage: examples/walkthrough.sh FOLDER
set -euo pipefail
out="${1:?name a new folder}"
mkdir -p "$out"
mezzo model get
cat > "$out/rows.jsonl" <<'ROWS'
{"prompt": "red", "completion": "a colour"}
{"prompt": "blue", "completion": "a colour"}
{"prompt": "green", "completion": "a colour"}
{"prompt": "apple", "completion": "a fruit"}
{"prompt": "pear", "completion": "a fruit"}
{"prompt": "plum", "completion": "a fruit"}
{"prompt": "oak", "completion": "a tree"}
{"prompt": "ash", "completion": "a tree"}
ROWS
mezzo data check "$out/rows.jsonl"
mezzo nlora train --data "$out/rows.jsonl" --out "$out/run" --steps 8 --batch-size 4 --eval-rows 0
mezzo nlora eval "$out/run" --data "$out/rows.jsonl" --rows 4 --max-new-tokens 12 --base --json
mezzo nlora inspect "$out/run"
mezzo nlora export "$out/run" --out "$out/lora"
mezzo nlora export "$out/run" --to merged --out "$out/merged"
echo "plum" | mezzo nlora chat "$out/run" --max-new-tokens 12
