//! A randomised test: texts generated under random schemas are valid by an independent validator, except for the
//! assertions that were listed as left out.

use std::collections::BTreeMap;
use std::sync::Arc;

use metal_attention::Constraint;
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::ChatTemplate;
use serde_json::{Map, Value, json};

use crate::constraint::{Grammar, GrammarCompiler};
use crate::test_vocabulary::vocabulary;

/// The environment variable with the number of schemas. The default takes a few seconds.
const NUMBER: &str = "METAL_ATTENTION_RANDOM_SCHEMAS";
const TEXTS_OF_A_SCHEMA: usize = 4;
/// The maximum length of a generated text in bytes. Longer texts are dropped.
const MAX_TEXT: usize = 600;

/// A pseudo-random number generator (`SplitMix64`).
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn pick<'a, T>(&mut self, values: &'a [T]) -> &'a T {
        &values[self.below(values.len())]
    }
}

const NAMES: [&str; 6] = ["a", "b", "x-a", "n_s", "ü", "a/b~c"];
const PATTERNS: [&str; 8] = ["^x-", "_s$", "^[a-z]+$", "a", "^(?!q)", "\\d{2,3}", "^y-", "é|ü"];

fn value(random: &mut SplitMix64) -> Value {
    let values = [
        json!(null),
        json!(true),
        json!(3),
        json!(-0.5),
        json!("a"),
        json!("ü\n"),
        json!([1, "a"]),
        json!({"a": 1}),
        json!(12),
    ];
    random.pick(&values).clone()
}

fn schemas(random: &mut SplitMix64, depth: usize) -> Value {
    (0..=random.below(3)).map(|_| schema(random, depth)).collect()
}

/// A random schema. It is well-formed, but may be unsatisfiable.
fn schema(random: &mut SplitMix64, depth: usize) -> Value {
    if random.one_in(24) {
        return Value::Bool(!random.one_in(4));
    }
    if depth == 0 || random.one_in(8) {
        let ends = [
            json!({"type": "integer"}),
            json!({"type": "boolean"}),
            json!({"type": "null"}),
            json!({"enum": [1, "a", null]}),
            json!({"const": {"a": [1]}}),
            json!({"type": "string", "maxLength": 5}),
            json!({"$ref": "#/$defs/D"}),
            json!({"$ref": "#/%24defs/D"}),
        ];
        return random.pick(&ends).clone();
    }
    let mut out = Map::new();
    let kinds = ["object", "object", "array", "string", "number", "integer", "any"];
    let kind = *random.pick(&kinds);
    if kind != "any" {
        out.insert("type".into(), if random.one_in(6) { json!([kind, "null"]) } else { json!(kind) });
    }
    let mut put =
        |random: &mut SplitMix64, odds: usize, keyword: &str, value: &mut dyn FnMut(&mut SplitMix64) -> Value| {
            if random.one_in(odds) {
                let value = value(random);
                out.insert(keyword.into(), value);
            }
        };
    let count = |random: &mut SplitMix64| json!(random.below(4));
    if ["object", "any"].contains(&kind) {
        put(random, 1, "properties", &mut |random| {
            let names: BTreeMap<_, _> =
                (0..random.below(4)).map(|_| (*random.pick(&NAMES), schema(random, depth - 1))).collect();
            json!(names)
        });
        put(random, 2, "required", &mut |random| {
            let mut names: Vec<_> = (0..random.below(3)).map(|_| *random.pick(&NAMES)).collect();
            names.sort_unstable();
            names.dedup();
            json!(names)
        });
        put(random, 3, "additionalProperties", &mut |random| {
            if random.one_in(2) { json!(false) } else { schema(random, depth - 1) }
        });
        put(random, 5, "patternProperties", &mut |random| {
            let patterns: BTreeMap<_, _> =
                (0..random.below(3)).map(|_| (*random.pick(&PATTERNS), schema(random, depth - 1))).collect();
            json!(patterns)
        });
        put(random, 8, "propertyNames", &mut |random| {
            let names = [
                json!({"pattern": random.pick(&PATTERNS)}),
                json!({"type": "string"}),
                json!({"enum": ["a", "b", "c"]}),
                json!({"maxLength": 3}),
                json!({}),
            ];
            random.pick(&names).clone()
        });
        put(random, 9, "minProperties", &mut |random| count(random));
        put(random, 9, "maxProperties", &mut |random| count(random));
        put(random, 9, "dependentRequired", &mut |random| json!({*random.pick(&NAMES): [random.pick(&NAMES)]}));
        put(random, 12, "unevaluatedProperties", &mut |_| json!(false));
    }
    if ["array", "any"].contains(&kind) {
        put(random, 2, "items", &mut |random| schema(random, depth - 1));
        put(random, 4, "prefixItems", &mut |random| schemas(random, depth - 1));
        put(random, 4, "minItems", &mut |random| count(random));
        put(random, 2, "maxItems", &mut |random| count(random));
        put(random, 8, "uniqueItems", &mut |_| json!(true));
        put(random, 12, "contains", &mut |random| schema(random, depth - 1));
    }
    if ["string", "any"].contains(&kind) {
        put(random, 4, "minLength", &mut |random| count(random));
        put(random, 3, "maxLength", &mut |random| json!(random.below(8)));
        put(random, 4, "pattern", &mut |random| json!(random.pick(&PATTERNS)));
        put(random, 6, "format", &mut |random| json!(random.pick(&["date", "uuid", "password", "ipv4", "iri"])));
    }
    if ["number", "integer", "any"].contains(&kind) {
        let bound = |random: &mut SplitMix64| {
            let bounds =
                [json!(-7), json!(0), json!(2.5), json!(100), json!(9_223_372_036_854_775_807_i64), json!(1e300)];
            random.pick(&bounds).clone()
        };
        put(random, 3, "minimum", &mut |random| bound(random));
        put(random, 3, "maximum", &mut |random| bound(random));
        put(random, 8, "exclusiveMinimum", &mut |random| bound(random));
        put(random, 8, "exclusiveMaximum", &mut |random| bound(random));
        put(random, 5, "multipleOf", &mut |random| random.pick(&[json!(3), json!(0.5), json!(7), json!(9973)]).clone());
    }
    put(random, 12, "enum", &mut |random| (0..=random.below(4)).map(|_| value(random)).collect());
    put(random, 20, "const", &mut value);
    put(random, 8, "anyOf", &mut |random| schemas(random, depth - 1));
    put(random, 8, "oneOf", &mut |random| schemas(random, depth - 1));
    put(random, 8, "allOf", &mut |random| schemas(random, depth - 1));
    put(random, 12, "not", &mut |random| {
        let negations = [
            json!({"type": "null"}),
            json!({"required": ["a"]}),
            json!({"const": 3}),
            json!({}),
            json!({"type": "number"}),
        ];
        random.pick(&negations).clone()
    });
    put(random, 6, "title", &mut |_| json!("A title"));
    put(random, 8, "default", &mut value);
    put(random, 30, "$ref", &mut |_| json!("#/$defs/D"));
    if random.one_in(16) {
        out.insert("if".into(), json!({"type": "string"}));
        out.insert("then".into(), json!({"minLength": 2}));
    }
    out.into()
}

/// A text that `grammar` allows. Bytes are chosen at random, with a preference for those that end values. `None` if it
/// becomes too long.
fn text(grammar: &mut Grammar, tokenizer: &Tokenizer, random: &mut SplitMix64) -> Option<String> {
    let mut out = Vec::new();
    while out.len() < MAX_TEXT {
        let mut mask = vec![0u32; tokenizer.n_vocab().div_ceil(32)];
        grammar.allowed(&mut mask).unwrap_or_else(|why| panic!("{why} after {}", String::from_utf8_lossy(&out)));
        let allowed: Vec<u32> =
            (0..tokenizer.n_vocab() as u32).filter(|id| mask[*id as usize / 32] & (1 << (id % 32)) != 0).collect();
        let is_end = |id: &&u32| tokenizer.is_end_of_generation(**id);
        if let Some(_end) = allowed.iter().find(is_end) {
            return String::from_utf8(out).ok();
        }
        let closing: Vec<u32> =
            allowed.iter().copied().filter(|&id| b"\"}]:,".contains(&tokenizer.token_bytes(id)[0])).collect();
        let from = if closing.is_empty() || random.one_in(3) { &allowed } else { &closing };
        let id = *random.pick(from);
        out.extend(tokenizer.token_bytes(id));
        grammar.accept(id).unwrap();
        if grammar.is_complete() {
            return String::from_utf8(out).ok();
        }
    }
    None
}

/// Removes the keyword at `place`, a JSON pointer with `#`, from `schema`.
fn without(schema: &mut Value, place: &str) {
    let (parent, keyword) = place.trim_start_matches('#').rsplit_once('/').unwrap();
    let keyword = keyword.replace("~1", "/").replace("~0", "~");
    let parent = parent.replace("%24", "$");
    let Some(Value::Object(parent)) = schema.pointer_mut(&parent) else { panic!("there is no {place}") };
    let removed = parent.remove(&keyword).unwrap_or_else(|| panic!("there is no {place}"));
    if keyword == "oneOf" {
        let all = parent.entry("allOf").or_insert_with(|| json!([]));
        all.as_array_mut().unwrap().push(json!({"anyOf": removed}));
    }
}

#[test]
fn texts_of_random_schemas_are_valid() {
    let number = std::env::var(NUMBER).map_or(300, |n| n.parse().unwrap());
    let tokenizer: Arc<Tokenizer> = vocabulary(&[]);
    let grammars = GrammarCompiler::new(&tokenizer);
    let template = ChatTemplate::fallback(Arc::clone(&tokenizer));
    let (mut n_texts, mut refused) = (0, BTreeMap::<String, usize>::new());
    for seed in 0..number {
        let mut random = SplitMix64(seed);
        let mut schema = schema(&mut random, 3);
        if let Some(object) = schema.as_object_mut() {
            object.insert("$defs".into(), json!({"D": self::schema(&mut random, 2)}));
        } else {
            continue;
        }
        let strict = *random.pick(&[None, Some(false)]);
        let mut left_out = Vec::new();
        let grammar = match grammars.json_schema(&template, "", &schema, strict, &mut left_out) {
            Ok(grammar) => grammar,
            Err(error) => {
                let why = error.to_string();
                if !why.contains("no text can follow") {
                    println!("{seed}: {why}: {schema}");
                }
                *refused.entry(why).or_default() += 1;
                continue;
            }
        };
        let mut followed = schema.clone();
        // The deepest pointers first: removing an outer keyword removes everything in it.
        left_out.sort_by_key(|place| std::cmp::Reverse(place.len()));
        for place in &left_out {
            without(&mut followed, place);
        }
        let validator = jsonschema::draft202012::new(&followed).unwrap();
        for _ in 0..TEXTS_OF_A_SCHEMA {
            let Some(text) = text(&mut grammar.clone(), &tokenizer, &mut random) else { continue };
            n_texts += 1;
            // The validator's numbers are inexact beyond 2^53.
            if text.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > 15) {
                continue;
            }
            match serde_json::from_str::<Value>(&text) {
                Ok(value) => {
                    let errors: Vec<_> =
                        validator.iter_errors(&value).map(|e| format!("{e} at {}", e.schema_path())).collect();
                    assert!(errors.is_empty(), "{seed}: {text} by {schema} without {left_out:?}: {errors:?}");
                }
                Err(e) => assert!(e.to_string().contains("out of range"), "{seed}: {text}: {e}"),
            }
        }
    }
    println!("{n_texts} texts of {number} schemas; refused: {refused:?}");
    assert!(n_texts > number as usize);
    // Only unsatisfiable schemas may be refused.
    assert_eq!(refused.keys().find(|why| !why.contains("no text can follow")), None, "{refused:?}");
}
