//! Constrained generation of the command line: grammars, JSON schemas and regular expressions, on the built-in model.

use crate::common::{run, run_with_input, stderr, stdout};
use serde_json::Value;

/// The text that `run` generates with `flags`.
fn generated(flags: &[&str]) -> String {
    stdout(run(&[&["run", "-p", "Once upon a time", "--temp", "0", "-n", "60", "--device", "cpu"], flags].concat()))
}

/// The error that `run` prints for `flags`, which it rejects with exit code 2.
fn rejection(flags: &[&str]) -> String {
    let output = run(&[&["run", "-p", "Once"], flags].concat());
    assert_eq!(output.status.code(), Some(2), "{flags:?}");
    stderr(&output)
}

#[test]
fn continuations_match_the_grammar() {
    assert_eq!(generated(&["--regex", "^ (yes|no), said Lily\\.$"]), " yes, said Lily.");
    assert_eq!(generated(&["--grammar", "root ::= \" [\" number \"]\"\nnumber ::= \"7\"{3}"]), " [777]");
    assert_eq!(generated(&["--grammar", "start: \"<\" start \">\" | /x{2}/"]).replace(['<', '>'], ""), "xx");
    let schema = r#"{"type": "object", "properties": {"pet": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
        "required": ["pet", "old"]}"#;
    let pet: Value = serde_json::from_str(&generated(&["--json-schema", schema])).unwrap();
    assert!(["cat", "dog"].contains(&pet["pet"].as_str().unwrap()) && pet["old"].is_boolean(), "{pet}");
}

#[test]
fn grammars_and_schemas_are_read_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let grammar = file("abc.gbnf", "root ::= \"abc\" # one text\n");
    assert_eq!(generated(&["--grammar-file", &grammar]), "abc");
    let schema = file("schema.json", r#"{"const": 12}"#);
    assert_eq!(generated(&["--json-schema-file", &schema]), "12");
    assert_eq!(generated(&["-jf", &schema]), "12");
    assert_eq!(generated(&["-j", &format!("@{schema}")]), "12");
    let missing = run(&["run", "-p", "Once", "--grammar-file", "nowhere.gbnf"]);
    assert!(!missing.status.success() && stderr(&missing).contains("nowhere.gbnf"));
}

#[test]
fn chat_answers_match_the_grammar() {
    let flags = ["--regex", "yes|no", "--temp", "0", "-n", "20", "--device", "cpu"];
    let answer = stdout(run(&[&["run", "--chat", "-p", "Is it so?"][..], &flags].concat()));
    assert!(["yes\n", "no\n"].contains(&&*answer), "{answer}");
    let answers = stdout(run_with_input(&[&["chat"][..], &flags].concat(), b"Is it so?\nReally?\n"));
    assert!(answers.lines().count() == 2 && answers.lines().all(|line| line == "yes" || line == "no"), "{answers}");
}

#[test]
fn errors_in_grammars_name_the_line_or_path() {
    for (flags, message) in [
        (["--grammar", "root ::= a\na ::= b"], "error: the grammar: line 2: the rule \"b\" is not defined"),
        (["--grammar", "start: (\"a\""], "error: the grammar: line 1: "),
        (["--json-schema", "{"], "error: the JSON schema is no JSON: "),
        (["--json-schema", "{\"required\": 1}"], "error: the JSON schema: #/required must be a list of strings"),
        (["--regex", "a(?=b)"], "error: the regular expression: look-arounds, "),
    ] {
        let errors = rejection(&flags);
        assert!(errors.contains(message), "{errors}");
    }
    assert!(rejection(&["--regex", "a", "--grammar", "b"]).contains("cannot be used with"));
}
