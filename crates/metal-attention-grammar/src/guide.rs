//! What the engine enforces while it generates an answer, besides a grammar: an end of thoughts, one call alone, and room
//! for thoughts before a text in a given form.

use std::collections::VecDeque;
use std::sync::Arc;

use metal_attention::Constraint;
use metal_attention::tokenizer::{EncodeOptions, Tokenizer};
use metal_attention_chat::{AnswerEvent, ChatTemplate, HARMONY_ANSWER, ToolCallParser, ToolFormat};

use crate::Grammar;

/// Ends a message of thoughts where thoughts are messages, and begins another.
const NEXT: &str = "<|end|><|start|>assistant";

/// Most blank tokens between thoughts and text.
const MAX_BLANKS: usize = 4;

/// What a [`Guide`] enforces.
pub struct GuideOptions<'a> {
    /// The model's template.
    pub template: &'a ChatTemplate,
    /// Reads the answer: it knows the part of it that the prompt has.
    pub parser: ToolCallParser,
    /// The form of the text.
    pub grammar: Option<Grammar>,
    /// Most tokens of thoughts.
    pub budget: Option<usize>,
    /// The answer ends after its first call.
    pub single_call: bool,
    /// The answer may call functions.
    pub has_tools: bool,
    /// The answer is at its beginning, where thoughts may come although the prompt has not begun any.
    pub may_think: bool,
}

/// Restricts the tokens of one answer.
pub struct Guide {
    tokenizer: Arc<Tokenizer>,
    parser: ToolCallParser,
    /// Bytes that are no whole character yet.
    undecoded: Vec<u8>,
    grammar: Option<Grammar>,
    phase: ThinkingPhase,
    /// Tokens of thoughts that may still come.
    budget: Option<usize>,
    /// The text that ends thoughts, the first time and later.
    ends: [String; 2],
    n_ended: usize,
    /// Tokens of line breaks, which models write between thoughts and text.
    blanks: Vec<u32>,
    /// Tokens that come next, whatever the model wants.
    forced: VecDeque<u32>,
    single_call: bool,
    called: bool,
}

/// Thoughts before the text that the grammar describes.
enum ThinkingPhase {
    /// There may be some: their marker may come, of which `written` is there.
    Possible {
        start: &'static str,
        written: Vec<u8>,
        /// What is written is also the beginning of the text itself.
        is_text: bool,
        /// The grammar of the text from its beginning.
        fresh: Grammar,
        /// What the grammar allows next.
        mask: Vec<u32>,
    },
    /// The model thinks.
    Thinking { fresh: Grammar },
    /// The thoughts have ended: this many blank tokens may come before the text. `mask` is what the grammar allows next.
    Blank { n_left: usize, mask: Vec<u32> },
    /// There are none, or no more.
    Closed,
}

impl Guide {
    /// Enforces what `options` say; `None` where that is nothing.
    pub fn new(tokenizer: &Arc<Tokenizer>, options: GuideOptions<'_>) -> Option<Self> {
        let GuideOptions { template, parser, grammar, budget, single_call, has_tools, may_think } = options;
        if grammar.is_none() && budget.is_none() && !single_call {
            return None;
        }
        let harmony = template.tool_format() == ToolFormat::Harmony;
        let markers = template.reasoning();
        let phase = match (markers, &grammar) {
            (Some(markers), Some(grammar)) if may_think && budget != Some(0) && !parser.is_thinking() => {
                ThinkingPhase::Possible {
                    start: markers.start,
                    written: Vec::new(),
                    is_text: true,
                    fresh: grammar.clone(),
                    mask: Vec::new(),
                }
            }
            (Some(_) | None, _) => ThinkingPhase::Closed,
        };
        let ends = match (harmony, has_tools || grammar.is_some()) {
            (true, true) => [NEXT.to_owned(), NEXT.to_owned() + if grammar.is_some() { "" } else { HARMONY_ANSWER }],
            (true, false) => [NEXT.to_owned() + HARMONY_ANSWER, NEXT.to_owned() + HARMONY_ANSWER],
            (false, _) => [markers, markers].map(|markers| markers.map_or("", |markers| markers.end).to_owned()),
        };
        let plain = EncodeOptions { add_special: false, parse_special: false };
        let blanks = ["\n", "\n\n"].into_iter().flat_map(|text| tokenizer.encode(text, plain));
        let blanks = blanks.filter(|&id| spelling(tokenizer, id).iter().all(|byte| *byte == b'\n')).collect();
        let mut guide = Self {
            tokenizer: Arc::clone(tokenizer),
            parser,
            undecoded: Vec::new(),
            grammar,
            phase,
            budget,
            ends,
            n_ended: 0,
            blanks,
            forced: VecDeque::new(),
            single_call,
            called: false,
        };
        if harmony && budget == Some(0) && !has_tools && guide.grammar.is_none() && may_think {
            guide.force(HARMONY_ANSWER);
        }
        guide.end_thoughts();
        Some(guide)
    }

    fn force(&mut self, text: &str) {
        self.forced.extend(tokens_within(&self.tokenizer, text, true));
    }

    /// Ends thoughts that have had their tokens.
    fn end_thoughts(&mut self) {
        if self.budget == Some(0) && self.forced.is_empty() && self.parser.is_thinking() {
            let end = self.ends[self.n_ended.min(1)].clone();
            self.n_ended += 1;
            self.force(&end);
        }
    }

    /// Has the parser read a token.
    fn read(&mut self, id: u32) {
        self.undecoded.extend_from_slice(self.tokenizer.token_bytes(id));
        let mut text = String::new();
        while !self.undecoded.is_empty() {
            match std::str::from_utf8(&self.undecoded) {
                Ok(all) => {
                    text += all;
                    self.undecoded.clear();
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    text += &String::from_utf8_lossy(&self.undecoded[..valid]);
                    // Bytes that begin no character are replaced; those that may begin one wait.
                    let Some(invalid) = error.error_len() else {
                        self.undecoded.drain(..valid);
                        break;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.undecoded.drain(..valid + invalid);
                }
            }
        }
        let events = self.parser.push_token(&self.tokenizer, id, &text);
        self.called |= events.iter().any(|event| matches!(event, AnswerEvent::CallEnd { .. }));
    }
}

/// The tokens of `text` where it stands within another: some vocabularies put a blank before a text.
pub fn tokens_within(tokenizer: &Tokenizer, text: &str, parse_special: bool) -> Vec<u32> {
    let whole = tokenizer.encode(text, EncodeOptions { add_special: false, parse_special });
    let spelled: Vec<u8> = whole.iter().flat_map(|&id| spelling(tokenizer, id)).copied().collect();
    if spelled == text.as_bytes() {
        return whole;
    }
    let (mut ids, mut rest) = (Vec::new(), text.as_bytes());
    while !rest.is_empty() {
        let fits = (0..tokenizer.n_vocab() as u32).filter(|&id| {
            let spelling = tokenizer.token_bytes(id);
            !spelling.is_empty() && rest.starts_with(spelling)
        });
        let Some(longest) = fits.max_by_key(|&id| tokenizer.token_bytes(id).len()) else { return whole };
        rest = &rest[tokenizer.token_bytes(longest).len()..];
        ids.push(longest);
    }
    ids
}

/// The spelling of a token, that of a control token too.
fn spelling(tokenizer: &Tokenizer, id: u32) -> &[u8] {
    match tokenizer.token_bytes(id) {
        [] => tokenizer.token_text(id).unwrap_or_default().as_bytes(),
        bytes => bytes,
    }
}

fn set(mask: &mut [u32], id: u32) {
    if let Some(word) = mask.get_mut(id as usize / 32) {
        *word |= 1 << (id % 32);
    }
}

fn has(mask: &[u32], id: u32) -> bool {
    mask.get(id as usize / 32).is_some_and(|word| word & (1 << (id % 32)) != 0)
}

/// Allows all tokens of a vocabulary.
fn set_all(mask: &mut [u32], n_vocab: usize) {
    let whole = (n_vocab / 32).min(mask.len());
    mask[..whole].fill(u32::MAX);
    for id in whole * 32..n_vocab {
        set(mask, id as u32);
    }
}

impl Constraint for Guide {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<(), String> {
        if let Some(&id) = self.forced.front() {
            set(mask, id);
            return Ok(());
        }
        let n_vocab = self.tokenizer.n_vocab();
        match &mut self.phase {
            ThinkingPhase::Closed => match &mut self.grammar {
                Some(grammar) => grammar.allowed(mask)?,
                None => set_all(mask, n_vocab),
            },
            ThinkingPhase::Blank { n_left, mask: of_grammar } => {
                if let Some(grammar) = &mut self.grammar {
                    grammar.allowed(mask)?;
                }
                of_grammar.clear();
                of_grammar.extend_from_slice(mask);
                if *n_left > 0 {
                    self.blanks.iter().for_each(|&id| set(mask, id));
                }
            }
            ThinkingPhase::Thinking { .. } => {
                set_all(mask, n_vocab);
                for &id in self.tokenizer.end_of_generation() {
                    if let Some(word) = mask.get_mut(id as usize / 32) {
                        *word &= !(1 << (id % 32));
                    }
                }
            }
            ThinkingPhase::Possible { start, written, is_text, mask: of_grammar, .. } => {
                if let Some(grammar) = self.grammar.as_mut().filter(|_| *is_text) {
                    grammar.allowed(mask)?;
                }
                of_grammar.clear();
                of_grammar.extend_from_slice(mask);
                let rest = start.get(written.len()..).unwrap_or_default();
                if let Some(&id) = tokens_within(&self.tokenizer, rest, true).first() {
                    set(mask, id);
                }
            }
        }
        Ok(())
    }

    fn accept(&mut self, id: u32) -> Result<(), String> {
        let was_thinking = self.parser.is_thinking();
        let was_forced = self.forced.front() == Some(&id);
        if was_forced {
            self.forced.pop_front();
        }
        self.read(id);
        let phase = std::mem::replace(&mut self.phase, ThinkingPhase::Closed);
        match phase {
            ThinkingPhase::Closed => {
                if let Some(grammar) = &mut self.grammar {
                    grammar.accept(id)?;
                }
            }
            ThinkingPhase::Thinking { fresh } => {
                if self.parser.is_thinking() {
                    self.phase = ThinkingPhase::Thinking { fresh };
                } else {
                    self.grammar = Some(fresh);
                    self.phase = ThinkingPhase::Blank { n_left: MAX_BLANKS, mask: Vec::new() };
                }
            }
            ThinkingPhase::Blank { n_left, mask } => match &mut self.grammar {
                Some(grammar) if has(&mask, id) => grammar.accept(id)?,
                Some(_) | None => self.phase = ThinkingPhase::Blank { n_left: n_left.saturating_sub(1), mask },
            },
            ThinkingPhase::Possible { start, mut written, is_text, fresh, mask } => {
                written.extend_from_slice(spelling(&self.tokenizer, id));
                let follows = is_text && has(&mask, id);
                if start.as_bytes() == written {
                    self.phase = ThinkingPhase::Thinking { fresh };
                } else {
                    if let Some(grammar) = self.grammar.as_mut().filter(|_| follows) {
                        grammar.accept(id)?;
                    }
                    if start.as_bytes().starts_with(&written) {
                        self.phase = ThinkingPhase::Possible { start, written, is_text: follows, fresh, mask };
                    }
                }
            }
        }
        if was_thinking && self.parser.is_thinking() && !was_forced {
            self.budget = self.budget.map(|budget| budget.saturating_sub(1));
        }
        self.end_thoughts();
        Ok(())
    }

    fn is_complete(&self) -> bool {
        if self.single_call && self.called {
            return true;
        }
        matches!(self.phase, ThinkingPhase::Closed)
            && self.forced.is_empty()
            && self.grammar.as_ref().is_some_and(Constraint::is_complete)
    }
}

#[cfg(test)]
mod tests {
    use metal_attention::Model;
    use metal_attention_chat::{Message, RenderRequest, Tool};
    use serde_json::json;

    use super::*;
    use crate::GrammarCompiler;

    /// The text of a model that says `says`, byte by byte, wherever it may, and the first that is allowed elsewhere.
    fn answer(tokenizer: &Tokenizer, mut guide: Guide, says: &str) -> String {
        let mut said = Vec::new();
        while said.len() < says.len() && !guide.is_complete() {
            let mut mask = vec![0u32; tokenizer.n_vocab().div_ceil(32)];
            guide.allowed(&mut mask).unwrap();
            let allowed = || (0..tokenizer.n_vocab() as u32).filter(|&id| has(&mask, id));
            let wanted = allowed().find(|&id| tokenizer.token_bytes(id) == [says.as_bytes()[said.len()]]);
            let id =
                wanted.or_else(|| allowed().next()).unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&said)));
            guide.accept(id).unwrap();
            said.extend_from_slice(tokenizer.token_bytes(id));
        }
        String::from_utf8(said).unwrap()
    }

    fn template(name: &str) -> ChatTemplate {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../metal-attention-chat/tests/data/templates");
        ChatTemplate::new(&std::fs::read_to_string(format!("{folder}/{name}.jinja")).unwrap()).unwrap()
    }

    /// What a model with this template says after the question.
    fn said(name: &str, says: &str, change: impl FnOnce(&GrammarCompiler, &mut GuideOptions<'_>)) -> String {
        let tokenizer = Model::built_in().unwrap().tokenizer().unwrap();
        let grammars = GrammarCompiler::new(&tokenizer);
        let template = template(name);
        let messages = [Message::user("Question?")];
        let request = RenderRequest { messages: &messages, add_generation_prompt: true, ..Default::default() };
        let prompt = template.render(&request).unwrap().text;
        let mut wanted = GuideOptions {
            template: &template,
            parser: template.answer_parser(&prompt, &[]),
            grammar: None,
            budget: None,
            single_call: false,
            has_tools: false,
            may_think: true,
        };
        change(&grammars, &mut wanted);
        answer(&tokenizer, Guide::new(&tokenizer, wanted).unwrap(), says)
    }

    #[test]
    fn thoughts_end_with_their_budget() {
        let budget = |name: &str, says: &str, n: usize| said(name, says, |_, wanted| wanted.budget = Some(n));
        let says = "<think>abcdefghijklmnopqrstuvwxyz";
        assert_eq!(budget("qwen3", says, 4), "<think>abcd</think>mnopqrstuvwxyz");
        assert_eq!(budget("qwen3.5", "abcdefghijklmnop", 0), "</think>ijklmnop");
        assert_eq!(budget("qwen3.5", "abcdefghijklmnop", 3), "abc</think>lmnop");
        assert_eq!(budget("qwen3", "No thoughts.", 0), "No thoughts.");
        let channel = "<|channel|>final<|message|>";
        assert_eq!(budget("gpt-oss", &"x".repeat(30), 0), format!("{channel}xxx"));
    }

    #[test]
    fn thoughts_may_come_before_json() {
        let json = |name: &str, says: &str, budget: Option<usize>| {
            said(name, says, |grammars, wanted| {
                let prompt = if wanted.parser.is_thinking() { "<think>" } else { "" };
                wanted.grammar = Some(grammars.json_object(wanted.template, prompt).unwrap());
                wanted.budget = budget;
            })
        };
        for says in ["{\"a\":1}", "<think>\nHm.\n</think>\n\n{\"a\":1}", "<think></think>{\"a\":1}"] {
            assert_eq!(json("qwen3", says, None), says);
        }
        assert_eq!(json("qwen3.5", "Hm.\n</think>\n\n{\"a\":1}", None), "Hm.\n</think>\n\n{\"a\":1}");
        assert_eq!(json("qwen3", "<think>abcdefghijk{\"a\":1}", Some(3)), "<think>abc</think>{\"a\":1}");
        assert!(json("qwen3", "<think></think>{}", Some(0)).starts_with('{'));
        assert!(json("llama-3.1", "<think></think>{}", None).starts_with('{'));
    }

    #[test]
    fn an_answer_ends_with_its_first_call() {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let tools = [Tool::try_from(tool).unwrap()];
        let says = "Well.<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call><tool_call>{\"name\": \"f\"}";
        let text = said("qwen2.5", says, |_, wanted| {
            wanted.single_call = true;
            wanted.parser = wanted.template.answer_parser("", &tools);
        });
        assert!(says.starts_with(&text) && !text.contains("</tool_call><"), "{text}");
        assert!(text.starts_with("Well.<tool_call>{\"name\": \"f\", \"arguments\": {}}"), "{text}");
    }
}
