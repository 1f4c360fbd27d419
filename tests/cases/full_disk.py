"""A full disk (needs root and a tmpfs): a file saved before stays complete, and the exit code is 1, not 3 as for a damaged model."""

from lib import *

d = TMP + "small"
os.makedirs(d, exist_ok=True)
if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", d], capture_output=True).returncode:
    print("ok    left out: no tmpfs can be mounted")
    done()
try:
    check("synth: exit code", cli("synth", "custom", "-o", d + "/s.gguf")[0], 1)
    check("quantize: exit code", cli("quantize", BUILTIN, d + "/q.gguf", "q8_0")[0], 1)
    for f in os.listdir(d):
        os.remove(d + "/" + f)
    json.dump([{"role": "user", "content": "x" * 30000}], open(d + "/c.json", "w"))
    json.dump([{"role": "user", "content": "y" * 50000}], open(TMP + "big.json", "w"))
    try:
        open(d + "/fill", "wb").write(b"0" * 28672)
    except OSError:
        pass
    rc, _, err = cli("chat", "--load", TMP + "big.json", "--device", "cpu", stdin=f"/save {d}/c.json\n".encode())
    check("/save: says that it failed", rc != 0 or "space" in err, True)
    check(
        "what was saved before is whole",
        len(json.load(open(d + "/c.json"))[0]["content"]) if os.path.getsize(d + "/c.json") else 0,
        30000,
    )
except json.JSONDecodeError as e:
    check("what was saved before is whole", str(e), None)
finally:
    subprocess.run(["umount", d])
done()
