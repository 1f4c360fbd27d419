//! Answers as published models write them, with the result that parsing them must have.

/// The template's name, whether its prompt (with reasoning enabled) already begins the reasoning, the answer, and the expected
/// reasoning, text, and calls as `name arguments`.
pub type Published =
    (&'static str, bool, &'static str, Option<&'static str>, Option<&'static str>, &'static [&'static str]);

pub const PUBLISHED: &[Published] = &[
    // Reasoning that begins in the prompt, or in the answer.
    ("qwen3", false, "<think>\nTwo.\n</think>\n\nYes.", Some("Two."), Some("Yes."), &[]),
    ("smollm3", false, "<think>\nTwo.\n</think>\nYes.", Some("Two."), Some("Yes."), &[]),
    (
        "smollm3",
        false,
        "<think>Two.</think>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}",
        Some("Two."),
        None,
        &["add {\"a\": 1}"],
    ),
    ("deepseek-r1-distill", true, "Two.\n</think>\n\nYes.", Some("Two."), Some("Yes."), &[]),
    ("deepseek-v3.1", true, "Two.</think>Yes.", Some("Two."), Some("Yes."), &[]),
    ("glm-4.6", false, "\n<think>Two.</think>\nYes.", Some("Two."), Some("Yes."), &[]),
    ("seed-oss", false, "<seed:think>Two.</seed:think>Yes.", Some("Two."), Some("Yes."), &[]),
    ("granite-3.3", false, "<think>Two.</think>\n<response>Yes.</response>", Some("Two."), Some("Yes."), &[]),
    ("granite-3.3", false, "<response>\nYes.\n</response>\n", None, Some("Yes."), &[]),
    ("granite-3.3", false, "A </response> tag.", None, Some("A </response> tag."), &[]),
    ("gemma-3", false, "Yes.\n", None, Some("Yes.\n"), &[]),
    ("gemma-3", false, "{\"name\": \"add\", \"arguments\": {\"a\": 1}}", None, None, &["add {\"a\": 1}"]),
    // Mistral.
    (
        "ministral-3-reasoning",
        false,
        "[THINK]Two.[/THINK]Well.[TOOL_CALLS]add[ARGS]{\"a\": 1}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{}",
        Some("Two."),
        Some("Well."),
        &["add {\"a\": 1}", "get_weather {}"],
    ),
    (
        "mistral-nemo",
        false,
        "[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {\"a\": [1]}, \"id\": \"abcdefghi\"}, {\"name\": \"get_weather\", \"arguments\": {}}]",
        None,
        None,
        &["add {\"a\": [1]}", "get_weather {}"],
    ),
    // gpt-oss.
    (
        "gpt-oss",
        false,
        "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|> Yes.\n<|return|>",
        Some("Two."),
        Some(" Yes.\n"),
        &[],
    ),
    (
        "gpt-oss",
        false,
        "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>analysis<|message|>Three.<|end|>\
         <|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>\
         <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{\"a\": \"<|end|>\"}<|call|>",
        Some("Two.\nThree."),
        Some("Let me see."),
        &["add {\"a\": \"<|end|>\"}"],
    ),
    (
        "gpt-oss",
        false,
        " to=functions.get_weather<|channel|>commentary json<|message|>{\"city\": \"Bern\"}",
        None,
        None,
        &["get_weather {\"city\": \"Bern\"}"],
    ),
    ("gpt-oss", false, "<|channel|>final <|constrain|>json<|message|>{\"a\": 1}", None, Some("{\"a\": 1}"), &[]),
    ("gpt-oss", false, "<|channel|>analysis<|message|>Unfinished <|e", Some("Unfinished <|e"), None, &[]),
    ("gpt-oss", false, "No <|header|> at all", None, Some("No <|header|> at all"), &[]),
    // GLM.
    (
        "glm-4.6",
        false,
        "\n<think></think>\nWell.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n<arg_key>s</arg_key>\n\
         <arg_value>12 < 13\n</arg_value>\n</tool_call>\n<tool_call>get_weather\n</tool_call>",
        None,
        Some("Well."),
        &["add {\"a\": 12, \"s\": \"12 < 13\\n\"}", "get_weather {}"],
    ),
    (
        "glm-4.6",
        false,
        "<tool_call>add<arg_key>s</arg_key><arg_value>12</arg_value></tool_call>Done.",
        None,
        Some("Done."),
        &["add {\"s\": \"12\"}"],
    ),
    ("glm-4.6", false, "<tool_call>never mind", None, Some("<tool_call>never mind"), &[]),
    // Qwen3-Coder and Seed-OSS.
    (
        "qwen3-coder",
        false,
        "Well.\n<tool_call>\n<function=add>\n<parameter=s>\nif a < b:\n  12\n</parameter>\n<parameter=flag>\nTrue\n</parameter>\n\
         <parameter=list>\n[1, {\"b\": null}]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n</function>\n</tool_call>",
        None,
        Some("Well."),
        &["add {\"s\": \"if a < b:\\n  12\", \"flag\": true, \"list\": [1, {\"b\": null}]}", "get_weather {}"],
    ),
    (
        "qwen3-coder",
        false,
        "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        None,
        None,
        &["add {\"a\": 1}"],
    ),
    (
        "seed-oss",
        false,
        "<seed:think>Two.</seed:think>\n<seed:tool_call>\n<function=add>\n<parameter=s>12</parameter>\n<parameter=a>x</parameter>\n</function>\n</seed:tool_call>",
        Some("Two."),
        None,
        &["add {\"s\": \"12\", \"a\": \"x\"}"],
    ),
    // Qwen 3.5 and Nemotron 3, whose prompts begin the reasoning.
    (
        "qwen3.5",
        true,
        "Two.\n</think>\n\nWell.\n\n<tool_call>\n<function=add>\n<parameter=a>\n-1.5\n</parameter>\n<parameter=s>\n\"12\"\n  é\n\n</parameter>\n\
         <parameter=flag>\nFalse\n</parameter>\n<parameter=list>\n[{'b': None}]\n</parameter>\n</function>\n</tool_call>\n\
         <tool_call>\n<function=get_weather>\n</function>\n</tool_call>",
        Some("Two."),
        Some("Well."),
        &[
            "add {\"a\": -1.5, \"s\": \"\\\"12\\\"\\n  é\\n\", \"flag\": false, \"list\": [{\"b\": null}]}",
            "get_weather {}",
        ],
    ),
    ("qwen3.5", true, "\n</think>\n\nYes.", None, Some("Yes."), &[]),
    (
        "qwen3.5",
        true,
        "</think><tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\nand so on</function>\n</tool_call>",
        None,
        Some("and so on</function>\n</tool_call>"),
        &["add {\"a\": 1}"],
    ),
    ("nemotron-3-nano", true, "Two.\n</think>\nYes.", Some("Two."), Some("Yes."), &[]),
    (
        "nemotron-3-nano",
        true,
        "Two.</think>\n<tool_call>\n<function=add>\n<parameter=s>\n12\n</parameter>\n</function>\n</tool_call>\n",
        Some("Two."),
        None,
        &["add {\"s\": \"12\"}"],
    ),
    // Nemotron Nano 2.
    (
        "nemotron-nano-2",
        true,
        "Two.\n</think>\n\nWell.\n<TOOLCALL>[{\"name\": \"add\", \"arguments\": {\"s\": \"]</TOOLCALL>\"}}, \
         {\"name\": \"get_weather\", \"arguments\": \"{}\"}]</TOOLCALL>\n",
        Some("Two."),
        Some("Well."),
        &["add {\"s\": \"]</TOOLCALL>\"}", "get_weather {}"],
    ),
    (
        "nemotron-nano-2",
        true,
        "</think><TOOLCALL>{\"name\": \"add\", \"arguments\": {}}</TOOLCALL>Done.",
        None,
        Some("Done."),
        &["add {}"],
    ),
    ("nemotron-nano-2", true, "</think><TOOLCALL>[later]", None, Some("<TOOLCALL>[later]"), &[]),
    // LFM2.
    (
        "lfm2",
        false,
        "Well.<|tool_call_start|>[add(a=1.5, s=\"a, \\\"b\\\")\\né\", flag=True, list=['x', {\"y\": [None]}]), get_weather()]<|tool_call_end|>Done.",
        None,
        Some("Well.Done."),
        &[
            "add {\"a\": 1.5, \"s\": \"a, \\\"b\\\")\\né\", \"flag\": true, \"list\": [\"x\", {\"y\": [null]}]}",
            "get_weather {}",
        ],
    ),
    (
        "lfm2",
        false,
        "<|tool_call_start|>[{\"name\": \"add\", \"arguments\": {\"a\": 1}}, {\"name\": \"get_weather\", \"arguments\": {}}]<|tool_call_end|>",
        None,
        None,
        &["add {\"a\": 1}", "get_weather {}"],
    ),
    (
        "lfm2",
        false,
        "<|tool_call_start|>get_weather()<|tool_call_end|>\n<|tool_call_start|>[add('12', \"x\")]<|tool_call_end|>",
        None,
        None,
        &["get_weather {}", "add {\"a\": \"12\", \"s\": \"x\"}"],
    ),
    (
        "lfm2",
        false,
        "<|tool_call_start|>[]<|tool_call_end|>",
        None,
        Some("<|tool_call_start|>[]<|tool_call_end|>"),
        &[],
    ),
    ("lfm2", false, "<|tool_call_start|>[add (up)", None, Some("<|tool_call_start|>[add (up)"), &[]),
    ("lfm2", false, "[add(a=1)]", None, Some("[add(a=1)]"), &[]),
    (
        "lfm2.5",
        false,
        "<think>Two.</think>\n\nWell. <|tool_call_start|>[add(s='it's \"so\", yes')]<|tool_call_end|>",
        Some("Two."),
        Some("Well."),
        &["add {\"s\": \"it's \\\"so\\\", yes\"}"],
    ),
    // Falcon-H1, Jamba, RWKV.
    (
        "falcon-h1",
        false,
        "Well.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>\n",
        None,
        Some("Well."),
        &["add {\"a\": 1}"],
    ),
    (
        "jamba",
        false,
        " Well.\n<tool_calls>[\n    {\"name\": \"add\", \"arguments\": {\"a\": 1}},\n    {\"name\": \"get_weather\", \"arguments\": {}}\n]</tool_calls>",
        None,
        Some(" Well."),
        &["add {\"a\": 1}", "get_weather {}"],
    ),
    ("rwkv-world", true, " Two.</think>\n\nYes.", Some("Two."), Some("Yes."), &[]),
    ("rwkv-world", true, "</think>{\"name\": \"add\", \"arguments\": {\"a\": 1}}", None, None, &["add {\"a\": 1}"]),
    // DeepSeek.
    (
        "deepseek-v3.1",
        false,
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>\
         <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        None,
        Some("Well."),
        &["add {\"a\": 1}", "get_weather {}"],
    ),
    (
        "deepseek-r1-distill",
        true,
        "Two.</think>\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜>\n\
         <｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Some("Two."),
        None,
        &["add {\"a\": 1}", "get_weather {}"],
    ),
    // Granite, Phi 4 mini, Command R.
    (
        "granite-3.3",
        false,
        "<|tool_call|>[{\"name\": \"add\", \"arguments\": {\"a\": 1}}, {\"name\": \"get_weather\", \"arguments\": {}}]",
        None,
        None,
        &["add {\"a\": 1}", "get_weather {}"],
    ),
    (
        "granite-4.0",
        false,
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>",
        None,
        None,
        &["add {\"a\": 1}"],
    ),
    (
        "granite-4.1",
        false,
        "Well.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {}}\n</tool_call>",
        None,
        Some("Well."),
        &["add {\"a\": 1}", "get_weather {}"],
    ),
    (
        "phi-4-mini",
        false,
        "<|tool_call|>[{\"name\": \"add\", \"arguments\": {\"a\": 1}}]<|/tool_call|>",
        None,
        None,
        &["add {\"a\": 1}"],
    ),
    (
        "command-r7b-tool-use",
        false,
        "<|START_THINKING|>Two.<|END_THINKING|><|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"add\", \"parameters\": {\"a\": 1}},\n    \
         {\"tool_call_id\": \"1\", \"tool_name\": \"get_weather\", \"parameters\": {}}\n]<|END_ACTION|>",
        Some("Two."),
        None,
        &["add {\"a\": 1}", "get_weather {}"],
    ),
    (
        "command-r7b-tool-use",
        false,
        "<|START_THINKING|>Two.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        Some("Two."),
        Some("Yes."),
        &[],
    ),
    // Gemma 4.
    (
        "gemma-4",
        false,
        "<|channel>thought\nTwo.\n<channel|>Well.<|tool_call>call:add{a:1.5,flag:true,list:[<|\"|>x, \"y\"<|\"|>,{b:null}],s:<|\"|>é}<|\"|>}<tool_call|>\
         <|tool_call>call:get_weather{}<tool_call|>",
        Some("Two."),
        Some("Well."),
        &[
            "add {\"a\": 1.5, \"flag\": true, \"list\": [\"x, \\\"y\\\"\", {\"b\": null}], \"s\": \"é}\"}",
            "get_weather {}",
        ],
    ),
    ("gemma-4", false, "<|tool_call>call me", None, Some("<|tool_call>call me"), &[]),
    // Phi 4 and others whose templates do not support tools, so that the messages describe them.
    ("phi-4", false, "{\"name\": \"add\", \"arguments\": {\"a\": 1}}", None, None, &["add {\"a\": 1}"]),
    ("phi-3.5", false, " Yes.", None, Some(" Yes."), &[]),
];
