"""A negative seed is random in the server, the command line and Python."""

from lib import *

body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 1.9, "min_p": 0, "top_p": 1, "top_k": 0}
with Server() as s:
    text = lambda **k: s.post("/v1/completions", {**body, **k})[1]["choices"][0]["text"]
    check("no seed: texts of 5", len({text() for _ in range(5)}), lambda n: n > 1)
    check("seed 7: texts of 5", len({text(seed=7) for _ in range(5)}), 1)
    check("seed -1: texts of 5", len({text(seed=-1) for _ in range(5)}), lambda n: n > 1)
    chat = lambda **k: s.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], **{k: v for k, v in body.items() if k != "prompt"}, **k},
    )[1]["choices"][0]["message"]["content"]
    check("chat, seed -1: texts of 5", len({chat(seed=-1) for _ in range(5)}), lambda n: n > 1)
    check("seed -2: texts of 5", len({text(seed=-2) for _ in range(5)}), lambda n: n > 1)
check(
    "run --seed -1: texts of 5",
    len(
        {
            cli(
                "run",
                "-p",
                "Once upon a time",
                "-n",
                "24",
                "--temp",
                "1.9",
                "--min-p",
                "0",
                "--top-p",
                "1",
                "--top-k",
                "0",
                "--seed",
                "-1",
                "--device",
                "cpu",
            )[1]
            for _ in range(5)
        }
    ),
    lambda n: n > 1,
)
try:
    from metal_attention import LLM, SamplingParams
except ImportError:
    print("skip   Python: the module is not installed")
else:
    llm = LLM(device="cpu")
    try:
        got = len(
            {
                llm.generate("Once upon a time", SamplingParams(seed=-1, temperature=1.9, max_tokens=24), use_tqdm=False)[0]
                .outputs[0]
                .text
                for _ in range(5)
            }
        )
    except Exception as e:
        got = f"{type(e).__name__}: {e}"
    check("Python, seed -1: texts of 5", got, lambda n: isinstance(n, int) and n > 1)
done()
