"""Escape sequences that a model generates are shown escaped on a terminal and are unchanged in a pipe."""

import pty, select, time
from lib import *

v = Vocab(["<|im_start|>"])
T = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>"
write(TMP + "esc.gguf", v, list(b"a\x1b]0;title\x07b\x1b[2Jc"), 3, T)


def terminal(args, typed=b"", wait=3):
    pid, fd = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execvp(args[0], args)
    out, end, sent = b"", time.time() + wait, not typed
    while time.time() < end:
        if select.select([fd], [], [], 0.2)[0]:
            try:
                d = os.read(fd, 65536)
            except OSError:
                break
            if not d:
                break
            out += d
        if not sent and time.time() > end - wait + 0.8:
            os.write(fd, typed)
            sent = True
    try:
        os.kill(pid, 9)
    except OSError:
        pass
    os.waitpid(pid, 0)
    return out


for name, a, typed in (
    ("run", ["run", "-p", "hey", "-n", "20", "--temp", "0"], b""),
    ("chat", ["chat", "-n", "20", "--temp", "0"], b"hey\r"),
):
    out = terminal([MA, *a, "-m", TMP + "esc.gguf", "-t", "1", "--device", "cpu"], typed)
    check(name + " on a terminal: no title set, no screen cleared", b"\x1b]0;" not in out and b"\x1b[2J" not in out, True)
_, out, _ = cli("run", "-p", "hey", "-n", "20", "--temp", "0", "-m", TMP + "esc.gguf", "-t", "1", "--device", "cpu")
check("run in a pipe: bytes as they are", "\x1b]0;title" in out, True)
done()
