//! [`GrammarCompiler`] compiles schemas, grammars, patterns and tool calls into a [`Grammar`], which masks the tokens
//! that may come next. llguidance does the compiling and the matching.

use std::io;
use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use metal_attention::Constraint;
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::{ChatTemplate, Tool};
use serde_json::{Value, json};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::gbnf::{self, GbnfError};
use crate::guide::encode_continuation;
use crate::lark;
use crate::pattern;
use crate::response_format::ResponseFormat;
use crate::schema::{Detail, prepared};

/// The reason why a grammar cannot be compiled. The strings say what is wrong, and where if that is known.
#[derive(Debug, thiserror::Error)]
pub enum GrammarError {
    /// The JSON schema is invalid or too large.
    #[error("{0}")]
    Schema(String),
    /// The GBNF grammar is invalid or too large.
    #[error("the grammar: {0}")]
    Gbnf(#[from] GbnfError),
    /// The Lark grammar is invalid or too large.
    #[error("the grammar: {0}")]
    Lark(String),
    /// The regular expression is invalid or uses a feature that is not supported.
    #[error("the regular expression: {0}")]
    Regex(String),
    /// The list of strings to choose from is empty or too large.
    #[error("the choice: {0}")]
    Choice(String),
    /// No text satisfies all parts.
    #[error("no text can follow all of it")]
    NoText,
    /// Two patterns of property names could match the same name after schemas are merged, so that it is ambiguous
    /// which schema applies.
    #[error("names by two patterns of merged schemas (allOf, anyOf, $ref) may meet")]
    PatternsMeet,
    /// A reference leads back to itself without consuming a value.
    #[error("a reference in it leads back to itself without a value between")]
    Circular,
    /// A limit of llguidance is exceeded.
    #[error("its grammar would be too large: make it simpler, or its bounds smaller")]
    TooLarge,
    /// Another error of llguidance. The log has it.
    #[error("no grammar can be made of it: make it simpler")]
    Other,
    /// The vocabulary is not supported.
    #[error("{0}")]
    Vocabulary(String),
    /// The operating system refused to start a thread.
    #[error("there is no thread for it: {0}")]
    Thread(#[source] io::Error),
}

impl GrammarError {
    /// The next coarser detail with which to try again after this error came of compiling with `detail`; `None` if no
    /// coarser detail would help.
    fn coarser_detail(&self, detail: Detail) -> Option<Detail> {
        match (self, detail) {
            (Self::PatternsMeet | Self::TooLarge | Self::Other, Detail::Full) => Some(Detail::Rough),
            (Self::Circular, Detail::Full | Detail::Rough) => Some(Detail::Flat),
            (
                Self::PatternsMeet
                | Self::Circular
                | Self::TooLarge
                | Self::Other
                | Self::Schema(_)
                | Self::Gbnf(_)
                | Self::Lark(_)
                | Self::Regex(_)
                | Self::Choice(_)
                | Self::NoText
                | Self::Vocabulary(_)
                | Self::Thread(_),
                _,
            ) => None,
        }
    }
}

/// Compiles grammars for one vocabulary.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    /// llguidance's parser factory for the vocabulary. It is built for the first grammar, because it takes time and
    /// memory.
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl GrammarCompiler {
    /// Returns a compiler for the vocabulary of `tokenizer`.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Self {
        Self { tokenizer: Arc::clone(tokenizer), factory: OnceLock::new() }
    }

    /// Compiles the grammar of an answer to `prompt`, which `template` has rendered. The answer's text must have the
    /// response format `format`; if the prompt ends with the start of reasoning, the text follows after the reasoning
    /// ends.
    ///
    /// The JSON pointers of assertions that are not enforced are added to `left_out`.
    pub fn response_format(
        &self,
        template: &ChatTemplate,
        prompt: &str,
        format: &ResponseFormat,
        left_out: &mut Vec<String>,
    ) -> Result<Grammar, GrammarError> {
        let reasoning = template.reasoning_begun(prompt);
        self.whole(format, left_out, |text| template.tool_format().text_grammar(text, reasoning, Some(&self.tokenizer)))
    }

    /// Compiles the grammar of a text that has the format `format` from its first token on. The JSON pointers of
    /// assertions that are not enforced are added to `left_out`.
    pub fn raw(&self, format: &ResponseFormat, left_out: &mut Vec<String>) -> Result<Grammar, GrammarError> {
        self.whole(format, left_out, |_| None)
    }

    /// Compiles `format`. `around` embeds its Lark expression in the grammar of a whole answer, or returns `None` if
    /// the text is the whole answer.
    fn whole(
        &self,
        format: &ResponseFormat,
        left_out: &mut Vec<String>,
        around: impl Fn(&str) -> Option<String>,
    ) -> Result<Grammar, GrammarError> {
        let nested = |lark: String| match around(&format!("%lark {{\n{lark}\n}}")) {
            Some(grammar) => TopLevelGrammar::from_lark(grammar),
            None => TopLevelGrammar::from_lark(lark),
        };
        let terminal = |pattern: &str| {
            let expression = lark::terminal(pattern);
            TopLevelGrammar::from_lark(around(&expression).unwrap_or_else(|| format!("start: {expression}")))
        };
        let json = |schema: &Value, strict, left_out: &mut Vec<String>| {
            self.constraint(left_out, |detail, left_out| {
                let schema = prepared(schema, strict, detail, left_out).map_err(GrammarError::Schema)?;
                Ok(match around(&format!("%json {schema}")) {
                    Some(grammar) => TopLevelGrammar::from_lark(grammar),
                    None => TopLevelGrammar::from_json_schema(schema),
                })
            })
        };
        match format {
            ResponseFormat::JsonObject => json(&json!({"type": "object"}), Some(false), left_out),
            ResponseFormat::JsonSchema { schema, strict } => json(schema, *strict, left_out),
            ResponseFormat::Gbnf(text) => self.constraint(left_out, |detail, _| {
                let lark = on_a_large_stack(|| gbnf::to_lark(text, &self.tokenizer, max_terminal(detail)))??;
                Ok(nested(lark))
            }),
            ResponseFormat::Lark(text) => {
                lark::check(text).map_err(GrammarError::Lark)?;
                let is_nested = around("").is_some();
                self.compile(nested(text.clone()), |error| lark::explained(error, is_nested).map(GrammarError::Lark))
            }
            ResponseFormat::Regex(pattern) => {
                let pattern = on_a_large_stack(|| pattern::whole(pattern))?.map_err(GrammarError::Regex)?;
                self.compile(terminal(&pattern), |_| None)
            }
            ResponseFormat::Choice(choices) => {
                let pattern = pattern::one_of(choices).map_err(GrammarError::Choice)?;
                self.compile(terminal(&pattern), |_| None)
            }
        }
    }

    /// Compiles the grammar of an answer to `prompt` whose text is any JSON object. See
    /// [`response_format`](Self::response_format).
    pub fn json_object(&self, template: &ChatTemplate, prompt: &str) -> Result<Grammar, GrammarError> {
        self.response_format(template, prompt, &ResponseFormat::JsonObject, &mut Vec::new())
    }

    /// Compiles the grammar of an answer to `prompt` whose text is JSON that is valid under `schema`. See
    /// [`ResponseFormat::JsonSchema`] for `strict`, and [`response_format`](Self::response_format).
    pub fn json_schema(
        &self,
        template: &ChatTemplate,
        prompt: &str,
        schema: &Value,
        strict: Option<bool>,
        left_out: &mut Vec<String>,
    ) -> Result<Grammar, GrammarError> {
        self.response_format(template, prompt, &ResponseFormat::JsonSchema { schema: schema.clone(), strict }, left_out)
    }

    /// Compiles the grammar of an answer to `prompt` that calls one of `tools` (with `parallel`: one or more calls),
    /// in the format of `template`, after reasoning if the prompt ends with its start.
    ///
    /// The JSON pointers of assertions that are not enforced are added to `left_out`, each after the name of its tool.
    pub fn calls(
        &self,
        template: &ChatTemplate,
        prompt: &str,
        tools: &[Tool],
        parallel: bool,
        left_out: &mut Vec<String>,
    ) -> Result<Grammar, GrammarError> {
        let reasoning = template.reasoning_begun(prompt);
        self.constraint(left_out, |detail, left_out| {
            let bounded = |tool: &Tool| {
                let mut json = tool.as_value().clone();
                let strict = json["function"]["strict"].as_bool();
                let mut places = Vec::new();
                json["function"]["parameters"] =
                    prepared(tool.parameters().unwrap_or(&json!({"type": "object"})), strict, detail, &mut places)?;
                left_out.extend(places.into_iter().map(|place| format!("{}{place}", tool.name())));
                Tool::try_from(json).map_err(|e| e.to_string())
            };
            let tools = tools.iter().map(bounded).collect::<Result<Vec<_>, _>>().map_err(GrammarError::Schema)?;
            let grammar = template.tool_format().grammar(&tools, parallel, reasoning, Some(&self.tokenizer));
            Ok(TopLevelGrammar::from_lark(grammar))
        })
    }

    /// Compiles the grammar that `make` returns, with as much schema detail as llguidance supports. `make` gets the
    /// detail and a list for the assertions that it leaves out.
    fn constraint(
        &self,
        left_out: &mut Vec<String>,
        make: impl Fn(Detail, &mut Vec<String>) -> Result<TopLevelGrammar, GrammarError>,
    ) -> Result<Grammar, GrammarError> {
        let mut detail = Detail::Full;
        loop {
            let mut places = Vec::new();
            match self.compile(make(detail, &mut places)?, |_| None) {
                Ok(grammar) => {
                    left_out.extend(places);
                    return Ok(grammar);
                }
                Err(error) => detail = error.coarser_detail(detail).ok_or(error)?,
            }
        }
    }

    /// Compiles `grammar`. `explain` may turn an error message of llguidance into a more precise error.
    fn compile(
        &self,
        grammar: TopLevelGrammar,
        explain: impl Fn(&str) -> Option<GrammarError>,
    ) -> Result<Grammar, GrammarError> {
        let factory = self.factory.get_or_init(|| factory(&self.tokenizer)).as_ref();
        let factory = factory.map_err(|why| GrammarError::Vocabulary(why.clone()))?;
        let compile = || factory.create_parser(grammar).map(|parser| Matcher::new(Ok(parser)));
        let error = match on_a_large_stack(compile)? {
            Ok(matcher) => return Ok(Grammar { matcher, tokenizer: Arc::clone(&self.tokenizer) }),
            Err(error) => error.to_string(),
        };
        Err(explain(&error).unwrap_or_else(|| explained(&error)))
    }
}

/// The maximum length of a terminal in characters, for each level of detail.
fn max_terminal(detail: Detail) -> usize {
    match detail {
        Detail::Full => 50_000,
        Detail::Rough => 2000,
        Detail::Flat => 100,
    }
}

/// The error for an error message of llguidance. The message itself goes to the log.
fn explained(error: &str) -> GrammarError {
    tracing::debug!("a grammar was not made: {error}");
    let has = |words: &[&str]| words.iter().any(|word| error.contains(word));
    if has(&["Unsatisfiable", "unsatisfiable", "Regex is empty", "empty regex"]) {
        GrammarError::NoText
    } else if has(&["not disjoint"]) {
        GrammarError::PatternsMeet
    } else if has(&["circular", "stack level"]) {
        GrammarError::Circular
    } else if has(&["fuel", "too large", "too big", "limit", "items; max", "states", "Unable to determine"]) {
        GrammarError::TooLarge
    } else {
        GrammarError::Other
    }
}

/// Runs `work` on a thread with a 64 MiB stack: compiling recurses once per link of a chain of schemas or rules.
fn on_a_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, GrammarError> {
    const STACK: usize = 64 << 20;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK);
        let thread = thread.spawn_scoped(scope, work).map_err(GrammarError::Thread)?;
        thread.join().map_err(|_| GrammarError::Other)
    })
}

/// Builds llguidance's parser factory from a trie of the vocabulary's spellings.
fn factory(tokenizer: &Tokenizer) -> Result<ParserFactory, String> {
    let end = tokenizer.eos().or_else(|| tokenizer.end_of_generation().first().copied()).unwrap_or_default();
    let info = TokRxInfo::new(tokenizer.n_vocab() as u32, end);
    // The trie marks special tokens by this byte, which does not occur in UTF-8. A text token that begins with it is
    // left out.
    let special = [TokTrie::SPECIAL_TOKEN_MARKER];
    let spelling = |id| match tokenizer.token_bytes(id) {
        [TokTrie::SPECIAL_TOKEN_MARKER, ..] => Vec::new(),
        [] => [&special, tokenizer.token_text(id).unwrap_or_default().as_bytes()].concat(),
        bytes => bytes.to_vec(),
    };
    let spellings: Vec<Vec<u8>> = (0..tokenizer.n_vocab() as u32).map(spelling).collect();
    let mut trie = TokTrie::from(&info, &spellings);
    if !tokenizer.end_of_generation().is_empty() {
        trie = trie.with_eos_tokens(tokenizer.end_of_generation());
    }
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&env).map_err(|e| e.to_string())?;
    factory.quiet();
    factory.limits_mut().verbose_errors = false;
    Ok(factory)
}

/// A compiled grammar and the state of matching one text: which tokens may come next. A clone matches another text
/// from the same state.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
    tokenizer: Arc<Tokenizer>,
}

impl Constraint for Grammar {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<(), String> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(|e| explained(&e.to_string()).to_string())?;
        for (word, &allowed) in mask.iter_mut().zip(allowed.as_slice()) {
            *word = allowed;
        }
        Ok(())
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        self.matcher.consume_token(id).map_err(|e| explained(&e.to_string()).to_string())
    }

    fn is_complete(&self) -> bool {
        self.matcher.is_stopped()
    }

    /// The tokens of the text that the grammar forces. A model may spell it otherwise. A copy of the matcher forces it: text with
    /// control tokens, as around Gemma 4's strings, leaves a matcher that allows nothing.
    fn forced(&mut self) -> Vec<u32> {
        match String::from_utf8(self.matcher.clone().compute_ff_bytes()) {
            Ok(text) if !text.is_empty() => encode_continuation(&self.tokenizer, &text, /* parse_special */ false),
            Ok(_) | Err(_) => Vec::new(),
        }
    }

    fn n_allowed(&mut self, ids: &[u32]) -> usize {
        // A token beyond the vocabulary is an error of a matcher, from which it does not recover.
        self.matcher.clone().validate_tokens(ids).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use metal_attention::Model;

    use super::*;
    use crate::test_vocabulary::{accepts, vocabulary};

    /// Whether `text` is valid and complete under the grammar of `schema`.
    fn follows(grammars: &GrammarCompiler, schema: &Value, strict: Option<bool>, text: &str) -> bool {
        let template = ChatTemplate::fallback(Arc::clone(&grammars.tokenizer));
        let mut constraint = grammars
            .json_schema(&template, "", schema, strict, &mut Vec::new())
            .unwrap_or_else(|why| panic!("{schema}: {why}"));
        let tokenizer = &grammars.tokenizer;
        let allowed = |constraint: &mut Grammar| {
            let mut mask = vec![0u32; tokenizer.n_vocab().div_ceil(32)];
            constraint.allowed(&mut mask).unwrap_or_default();
            (0..tokenizer.n_vocab() as u32).filter(move |id| mask[*id as usize / 32] & (1 << (id % 32)) != 0)
        };
        for byte in text.bytes() {
            match allowed(&mut constraint).find(|&id| tokenizer.token_bytes(id) == [byte]) {
                Some(id) => constraint.accept(id).unwrap(),
                None => return false,
            }
        }
        constraint.is_complete() || allowed(&mut constraint).any(|id| tokenizer.is_end_of_generation(id))
    }

    #[test]
    fn forced_tokens_and_checks_of_drafts_leave_the_masks_as_they_are() {
        let grammars = GrammarCompiler::new(&Model::built_in().unwrap().tokenizer().unwrap());
        let tokenizer = Arc::clone(&grammars.tokenizer);
        let schema = json!({"type": "object", "additionalProperties": false, "required": ["colour", "number"],
            "properties": {"colour": {"enum": ["red", "blue"]}, "number": {"const": 12}}});
        let template = ChatTemplate::fallback(Arc::clone(&tokenizer));
        let compile = || grammars.json_schema(&template, "", &schema, None, &mut Vec::new()).unwrap();
        let (mut with_drafts, mut plain) = (compile(), compile());
        let text = r#"{"colour":"blue","number":12}"#;
        let (mut done, mut n_forced) = (0, 0);
        while done < text.len() {
            let forced = with_drafts.forced();
            let spelled: Vec<u8> = forced.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
            // White space may stand between tokens of JSON, so that less is forced than one might think.
            assert!(text.as_bytes()[done..].starts_with(&spelled), "{:?} at {done}", String::from_utf8_lossy(&spelled));
            assert_eq!(with_drafts.n_allowed(&forced), forced.len());
            n_forced += forced.len();
            let mut masks = [(); 2].map(|()| vec![0u32; tokenizer.n_vocab().div_ceil(32)]);
            with_drafts.allowed(&mut masks[0]).unwrap();
            plain.allowed(&mut masks[1]).unwrap();
            assert_eq!(masks[0], masks[1], "at {done}");
            let allowed = |id: u32| masks[0][id as usize / 32] & (1 << (id % 32)) != 0;
            let byte = [text.as_bytes()[done]];
            let id =
                (0..tokenizer.n_vocab() as u32).find(|&id| allowed(id) && tokenizer.token_bytes(id) == byte).unwrap();
            // A token that may not come, behind one that may.
            let wrong = (0..tokenizer.n_vocab() as u32).find(|&id| tokenizer.token_bytes(id) == b"%").unwrap();
            assert_eq!(with_drafts.n_allowed(&[id, wrong]), 1, "at {done}");
            with_drafts.accept(id).unwrap();
            plain.accept(id).unwrap();
            done += 1;
        }
        assert!(n_forced > 10, "{n_forced}");
    }

    #[test]
    fn closed_objects_allow_only_named_properties() {
        let grammars = GrammarCompiler::new(&Model::built_in().unwrap().tokenizer().unwrap());
        let a = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
        let node = json!({"$ref": "#/$defs/N", "$defs": {"N": {"type": "object", "required": ["n"], "properties": {
            "n": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}}});
        let derived = json!({"allOf": [{"$ref": "#/$defs/A"}], "properties": {"b": {"type": "integer"}},
            "required": ["b"], "$defs": {"A": a}});
        let one_of_two = json!({"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"],
            "anyOf": [{"properties": {"x": {"type": "integer"}}, "required": ["x"]},
                      {"properties": {"y": {"type": "integer"}}, "required": ["y"]}]});
        let union = json!({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": {"A": a}});
        for (schema, good, bad) in [
            (&a, r#"{"a":1}"#, r#"{"a":1,"z":1}"#),
            (&json!({"type": "array", "items": a}), r#"[{"a":1},{"a":2}]"#, r#"[{"a":1,"z":1}]"#),
            (&json!({"type": "array", "prefixItems": [a], "items": false}), r#"[{"a":1}]"#, r#"[{"a":1,"z":1}]"#),
            (&json!({"type": "object", "additionalProperties": a}), r#"{"q":{"a":1}}"#, r#"{"q":{"a":1,"z":1}}"#),
            (
                &json!({"type": "object", "properties": {"d": {"type": "object", "additionalProperties": true}}}),
                r#"{"d":{"z":1}}"#,
                r#"{"d":{"z":1},"z":1}"#,
            ),
            (&node, r#"{"n":{"n":null}}"#, r#"{"n":{"n":null,"z":1}}"#),
            (&union, r#"{"a":1}"#, r#"{"a":1,"z":1}"#),
            (&derived, r#"{"a":1,"b":2}"#, r#"{"a":1,"b":2,"z":1}"#),
            (&one_of_two, r#"{"k":1,"y":2}"#, r#"{"k":1,"y":2,"z":1}"#),
            (&json!({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}), r#"{"xy":1}"#, r#"{"z":1}"#),
            (&json!({"type": "object", "properties": {}}), "{}", r#"{"z":1}"#),
        ] {
            for strict in [None, Some(true)] {
                assert!(follows(&grammars, schema, strict, good), "{good} by {schema}");
                assert!(!follows(&grammars, schema, strict, bad), "{bad} by {schema}");
            }
            assert!(follows(&grammars, schema, Some(false), good), "{good} by open {schema}");
            assert!(follows(&grammars, schema, Some(false), bad), "{bad} by open {schema}");
        }
        let any = json!({"type": "object"});
        assert!(follows(&grammars, &any, None, r#"{"z":1}"#) && !follows(&grammars, &any, Some(true), r#"{"z":1}"#));
        assert!(follows(&grammars, &any, Some(true), "{}"));
    }

    /// The marks around calls and reasoning are single tokens where the vocabulary has them, and the answer ends after
    /// the call.
    #[test]
    fn forced_calls_are_written_with_control_tokens() {
        use metal_attention::tokenizer::EncodeOptions;
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object",
            "properties": {"s": {"type": "string"}}, "required": ["s"]}}});
        let tools = [Tool::try_from(tool).unwrap()];
        for (source, control, answer) in [
            (
                "<arg_key> </think>",
                &["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"][..],
                "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a <b\n</arg_value>\n</tool_call>",
            ),
            (
                "<|tool_call>",
                &["<|tool_call>", "<tool_call|>", "<|\"|>"],
                "<|tool_call>call:f{s:<|\"|>a <b<|\"|>}<tool_call|>",
            ),
            (
                "<|channel|><|message|>",
                &["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"],
                "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary to=functions.f \
                 <|constrain|>json<|message|>{\"s\":\"a <b\"}",
            ),
            (
                "<|START_ACTION|> <|START_RESPONSE|> <|END_THINKING|>",
                &["<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"],
                "So.<|END_THINKING|><|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"f\", \
                 \"parameters\": {\"s\":\"a <b\"}}]<|END_ACTION|>",
            ),
            (
                "[TOOL_CALLS][ARGS][/THINK]",
                &["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"],
                "So.[/THINK][TOOL_CALLS]f[ARGS]{\"s\":\"a <b\"}",
            ),
            (
                "<｜tool▁calls▁begin｜> </think>",
                &[
                    "<｜tool▁calls▁begin｜>",
                    "<｜tool▁call▁begin｜>",
                    "<｜tool▁sep｜>",
                    "<｜tool▁call▁end｜>",
                    "<｜tool▁calls▁end｜>",
                ],
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"s\":\"a <b\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ),
        ] {
            let tokenizer = vocabulary(control);
            let template = ChatTemplate::with_tokenizer(source, Some(Arc::clone(&tokenizer))).unwrap();
            let prompt = if answer.starts_with("So.") { template.reasoning().unwrap().start } else { "" };
            let mut constraint =
                GrammarCompiler::new(&tokenizer).calls(&template, prompt, &tools, false, &mut Vec::new()).unwrap();
            let ids = tokenizer.encode(answer, EncodeOptions { add_special: false, parse_special: true });
            let mut parser = template.answer_parser(prompt, &tools);
            let mut events = Vec::new();
            for &id in &ids {
                let mut mask = vec![0u32; tokenizer.n_vocab().div_ceil(32)];
                constraint.allowed(&mut mask).unwrap();
                let text = tokenizer.token_text(id).unwrap();
                assert!(mask[id as usize / 32] & (1 << (id % 32)) != 0, "{source}: {text}");
                constraint.accept(id).unwrap();
                events.extend(parser.push_token(&tokenizer, id, &tokenizer.decode(&[id], false)));
            }
            let mut mask = vec![0u32; tokenizer.n_vocab().div_ceil(32)];
            let end = tokenizer.eos().unwrap();
            let may_end = |mask: &[u32]| mask[end as usize / 32] & (1 << (end % 32)) != 0;
            assert!(constraint.is_complete() || (constraint.allowed(&mut mask).is_ok() && may_end(&mask)), "{source}");
            events.extend(parser.finish());
            let message = metal_attention_chat::Message::from_events(events);
            let arguments: Value = serde_json::from_str(&message.tool_calls[0].function.arguments).unwrap();
            assert!(arguments["s"].as_str().unwrap().starts_with("a <b"), "{source}: {arguments}");
            assert_eq!(message.content, None, "{source}");
        }
    }

    /// Whether the grammar of `format` allows `text` as an answer. The prompt ends with the start of reasoning if
    /// `text` begins with "So".
    fn allows(source: &str, control: &[&str], format: &ResponseFormat, text: &str) -> bool {
        let tokenizer = vocabulary(control);
        let template = ChatTemplate::with_tokenizer(source, Some(Arc::clone(&tokenizer))).unwrap();
        let prompt = if text.starts_with("So") { template.reasoning().unwrap().start } else { "" };
        let grammar = GrammarCompiler::new(&tokenizer).response_format(&template, prompt, format, &mut Vec::new());
        accepts(grammar.unwrap_or_else(|why| panic!("{format:?}: {why}")), &tokenizer, text)
    }

    #[test]
    fn forms_apply_after_reasoning_and_in_the_final_channel() {
        let harmony = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"];
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
        for (format, good, bad) in [
            (ResponseFormat::JsonObject, r#"{"z":[1]}"#, "[1]"),
            (ResponseFormat::JsonSchema { schema, strict: None }, r#"{"a":1}"#, r#"{"a":1,"z":1}"#),
            (ResponseFormat::Gbnf("root ::= \"(\" root \")\" | \"x\"".into()), "((x))", "((x)"),
            (ResponseFormat::Lark("start: \"(\" start \")\" | /x+/".into()), "(xx)", "(xx"),
            (ResponseFormat::Regex("^[a-c]+/\n?$".into()), "abc/\n", "abd/"),
            (ResponseFormat::Choice(vec!["yes".into(), "yes, sir".into(), "a.c".into()]), "yes, sir", "abc"),
            (ResponseFormat::Choice(vec!["yes".into(), "yes, sir".into()]), "yes", "yes,"),
        ] {
            let answers: [(&str, &[&str], &str); 4] = [
                ("", &[], ""),
                ("<think> </think>", &["</think>"], "So.</think>\n"),
                ("<|channel|><|message|>", &harmony, "<|channel|>final<|message|>"),
                (
                    "<|channel|><|message|>",
                    &harmony,
                    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>",
                ),
            ];
            for (source, control, before) in answers {
                assert!(allows(source, control, &format, &format!("{before}{good}")), "{before}{good} as {format:?}");
                assert!(!allows(source, control, &format, &format!("{before}{bad}")), "{before}{bad} as {format:?}");
            }
            let tokenizer = vocabulary(&[]);
            let raw = GrammarCompiler::new(&tokenizer).raw(&format, &mut Vec::new()).unwrap();
            assert!(accepts(raw.clone(), &tokenizer, good) && !accepts(raw, &tokenizer, bad), "{format:?}");
        }
    }

    #[test]
    fn errors_name_the_kind_of_form_and_the_line() {
        let grammars = GrammarCompiler::new(&vocabulary(&[]));
        let deep = "start: ".to_owned() + &"(".repeat(2000) + "\"a\"" + &")".repeat(2000);
        let chain = (0..3000).map(|i| format!("a{i}: \"x\" a{}\n", i + 1)).collect::<Vec<_>>().concat();
        for (format, named) in [
            (ResponseFormat::Gbnf("root ::= x".into()), "the grammar: line 1: the rule \"x\" is not defined"),
            (ResponseFormat::Lark("start: a\na: (\"x\"".into()), "the grammar: line 2: "),
            (ResponseFormat::Lark("start: %%".into()), "the grammar: line 1: "),
            (ResponseFormat::Lark("start: a".into()), "the grammar: line 1: unknown name: \"a\""),
            (ResponseFormat::Lark("a: \"a\"".into()), "the grammar: "),
            (ResponseFormat::Lark(deep), "the grammar: line 1: "),
            (ResponseFormat::Lark(format!("start: a0\n{chain}")), "the grammar: "),
            (ResponseFormat::Regex("a(?=b)".into()), "the regular expression: look-arounds"),
            (ResponseFormat::Choice(Vec::new()), "the choice: there is nothing to choose from"),
        ] {
            let error = grammars.raw(&format, &mut Vec::new()).err().map_or_else(String::new, |why| why.to_string());
            assert!(error.starts_with(named), "{error}");
        }
    }
}
