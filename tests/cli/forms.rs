//! What a text must look like: grammars, JSON schemas and regular expressions, on the built-in model.

use crate::common::{run, run_with_input, stderr, stdout};
use serde_json::Value;

/// What the model writes with `flags`, as a continuation.
fn text(flags: &[&str]) -> String {
    stdout(run(&[&["run", "-p", "Once upon a time", "--temp", "0", "-n", "60", "--device", "cpu"], flags].concat()))
}

/// What `run` says of `flags`, which it refuses.
fn refused(flags: &[&str]) -> String {
    let output = run(&[&["run", "-p", "Once"], flags].concat());
    assert_eq!(output.status.code(), Some(2), "{flags:?}");
    stderr(&output)
}

#[test]
fn texts_have_the_form_that_is_asked_for() {
    assert_eq!(text(&["--regex", "^ (yes|no), said Lily\\.$"]), " yes, said Lily.");
    assert_eq!(text(&["--grammar", "root ::= \" [\" number \"]\"\nnumber ::= \"7\"{3}"]), " [777]");
    assert_eq!(text(&["--grammar", "start: \"<\" start \">\" | /x{2}/"]).replace(['<', '>'], ""), "xx");
    let schema = r#"{"type": "object", "properties": {"pet": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
        "required": ["pet", "old"]}"#;
    let pet: Value = serde_json::from_str(&text(&["--json-schema", schema])).unwrap();
    assert!(["cat", "dog"].contains(&pet["pet"].as_str().unwrap()) && pet["old"].is_boolean(), "{pet}");
}

#[test]
fn forms_come_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let grammar = file("abc.gbnf", "root ::= \"abc\" # one text\n");
    assert_eq!(text(&["--grammar-file", &grammar]), "abc");
    let schema = file("schema.json", r#"{"const": 12}"#);
    assert_eq!(text(&["--json-schema-file", &schema]), "12");
    assert_eq!(text(&["-jf", &schema]), "12");
    assert_eq!(text(&["-j", &format!("@{schema}")]), "12");
    let missing = run(&["run", "-p", "Once", "--grammar-file", "nowhere.gbnf"]);
    assert!(!missing.status.success() && stderr(&missing).contains("nowhere.gbnf"));
}

#[test]
fn answers_have_the_form_that_is_asked_for() {
    let flags = ["--regex", "yes|no", "--temp", "0", "-n", "20", "--device", "cpu"];
    let answer = stdout(run(&[&["run", "--chat", "-p", "Is it so?"][..], &flags].concat()));
    assert!(["yes\n", "no\n"].contains(&&*answer), "{answer}");
    let answers = stdout(run_with_input(&[&["chat"][..], &flags].concat(), b"Is it so?\nReally?\n"));
    assert!(answers.lines().count() == 2 && answers.lines().all(|line| line == "yes" || line == "no"), "{answers}");
}

#[test]
fn mistakes_are_named_with_their_place() {
    for (flags, said) in [
        (["--grammar", "root ::= a\na ::= b"], "error: the grammar: line 2: the rule \"b\" is not defined"),
        (["--grammar", "start: (\"a\""], "error: the grammar: line 1: "),
        (["--json-schema", "{"], "error: the JSON schema is no JSON: "),
        (["--json-schema", "{\"required\": 1}"], "error: the JSON schema: #/required must be a list of strings"),
        (["--regex", "a(?=b)"], "error: the regular expression: look-arounds, "),
    ] {
        let errors = refused(&flags);
        assert!(errors.contains(said), "{errors}");
    }
    assert!(refused(&["--regex", "a", "--grammar", "b"]).contains("cannot be used with"));
}
