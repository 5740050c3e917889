"""A contender's process without a model, for tests of those who deal with it. Its precision is what it shall do.

float32 serves; a `setting` says otherwise: {"die_at": "load" | turn}, {"silent": true}, {"log": file} for its turns,
{"rate": units per second}, {"rates": one per turn}, {"ids": ...}.
"""

import json
import sys
import time

order = json.loads(sys.stdin.readline())
setting = order["setting"]
ids = setting.get("ids", [[1, 2, 3]])
print("loading", file=sys.stderr)
if setting.get("die_at") == "load":
    print("RuntimeError: no weights here", file=sys.stderr)
    sys.exit(setting.get("advice", 1))
if setting.get("silent"):
    time.sleep(60)
print(json.dumps({"ready": {"seconds": 0.1, "version": "1.0", "ids": ids}}), flush=True)
for line in sys.stdin:
    turn = json.loads(line)["turn"]
    if "log" in setting:
        with open(setting["log"], "a") as log:
            log.write(f"{turn} {order['name']}\n")
    if setting.get("die_at") == turn:
        sys.exit("MemoryError: all of it is gone")
    rates = setting.get("rates", [setting.get("rate", 100.0)])
    answer = {"ids": ids, "seconds": 1.0, "units": rates[turn % len(rates)], "first": 0.25}
    print(json.dumps(answer), flush=True)
