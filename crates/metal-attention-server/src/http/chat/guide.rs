//! What the engine enforces while it generates an answer, besides a grammar: an end of thoughts, one call alone, and room
//! for thoughts before a text in a given form.

use std::collections::VecDeque;
use std::sync::Arc;

use metal_attention::scheduler::Constraint;
use metal_attention::tokenizer::{EncodeOptions, Tokenizer};
use metal_attention_chat::{AnswerEvent, ChatTemplate, ToolCallParser, ToolFormat};

use crate::http::constraint::Grammar;

/// What is wanted of an answer.
pub struct Wanted<'a> {
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
    opening: Opening,
    /// Tokens of thoughts that may still come.
    budget: Option<usize>,
    /// The text that ends thoughts, the first time and later.
    ends: [String; 2],
    n_ended: usize,
    /// Tokens that come next, whatever the model wants.
    forced: VecDeque<u32>,
    single_call: bool,
    called: bool,
}

/// Thoughts before the text that the grammar describes.
enum Opening {
    /// There may be some: their marker may come, of which `written` is there.
    Possible { start: &'static str, end: &'static str, written: Vec<u8>, grammar_follows: bool, fresh: Grammar, mask: Vec<u32> },
    /// The model thinks.
    Thinking { fresh: Grammar },
    /// There are none, or no more.
    Closed,
}

impl Guide {
    /// Enforces what is wanted; `None` where that is nothing.
    pub fn new(tokenizer: &Arc<Tokenizer>, wanted: Wanted<'_>) -> Option<Self> {
        let Wanted { template, parser, grammar, budget, single_call, has_tools, may_think } = wanted;
        if grammar.is_none() && budget.is_none() && !single_call {
            return None;
        }
        let harmony = template.tool_format() == ToolFormat::Harmony;
        let markers = template.reasoning();
        let opening = match (markers, &grammar) {
            (Some(markers), Some(grammar)) if may_think && budget != Some(0) && !parser.is_thinking() => Opening::Possible {
                start: markers.start,
                end: markers.end,
                written: Vec::new(),
                grammar_follows: true,
                fresh: grammar.clone(),
                mask: Vec::new(),
            },
            (Some(_) | None, _) => Opening::Closed,
        };
        const NEXT: &str = "<|end|><|start|>assistant";
        const FINAL: &str = "<|channel|>final<|message|>";
        let ends = match (harmony, has_tools || grammar.is_some()) {
            (true, true) => [NEXT.to_owned(), NEXT.to_owned() + if grammar.is_some() { "" } else { FINAL }],
            (true, false) => [NEXT.to_owned() + FINAL, NEXT.to_owned() + FINAL],
            (false, _) => [markers, markers].map(|markers| markers.map_or("", |markers| markers.end).to_owned()),
        };
        let mut guide = Self {
            tokenizer: Arc::clone(tokenizer),
            parser,
            undecoded: Vec::new(),
            grammar,
            opening,
            budget,
            ends,
            n_ended: 0,
            forced: VecDeque::new(),
            single_call,
            called: false,
        };
        if harmony && budget == Some(0) && !has_tools && guide.grammar.is_none() && may_think {
            guide.force(FINAL);
        }
        guide.end_thoughts();
        Some(guide)
    }

    fn force(&mut self, text: &str) {
        let options = EncodeOptions { add_special: false, parse_special: true };
        self.forced.extend(self.tokenizer.encode(text, options));
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

    /// The spelling of a token, that of a control token too.
    fn spelling(&self, id: u32) -> &[u8] {
        match self.tokenizer.token_bytes(id) {
            [] => self.tokenizer.token_text(id).unwrap_or_default().as_bytes(),
            bytes => bytes,
        }
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
    for id in 0..n_vocab as u32 {
        set(mask, id);
    }
}

impl Constraint for Guide {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<(), String> {
        if let Some(&id) = self.forced.front() {
            set(mask, id);
            return Ok(());
        }
        let n_vocab = self.tokenizer.n_vocab();
        match &mut self.opening {
            Opening::Closed => match &mut self.grammar {
                Some(grammar) => grammar.allowed(mask)?,
                None => set_all(mask, n_vocab),
            },
            Opening::Thinking { .. } => {
                set_all(mask, n_vocab);
                for &id in self.tokenizer.end_of_generation() {
                    mask[id as usize / 32] &= !(1 << (id % 32));
                }
            }
            Opening::Possible { start, written, grammar_follows, mask: of_grammar, .. } => {
                if let Some(grammar) = self.grammar.as_mut().filter(|_| *grammar_follows) {
                    grammar.allowed(mask)?;
                }
                of_grammar.clear();
                of_grammar.extend_from_slice(mask);
                let options = EncodeOptions { add_special: false, parse_special: true };
                let rest = start.get(written.len()..).unwrap_or_default();
                let next = self.tokenizer.encode(rest, options).into_iter();
                // Some vocabularies put a blank before a text.
                next.take(2).find(|&id| {
                    let spelling = match self.tokenizer.token_bytes(id) {
                        [] => self.tokenizer.token_text(id).unwrap_or_default().as_bytes(),
                        bytes => bytes,
                    };
                    rest.as_bytes().starts_with(spelling)
                }).into_iter().for_each(|id| set(mask, id));
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
        let spelling = self.spelling(id).to_vec();
        self.read(id);
        let opening = std::mem::replace(&mut self.opening, Opening::Closed);
        match opening {
            Opening::Closed => {
                if let Some(grammar) = &mut self.grammar {
                    grammar.accept(id)?;
                }
            }
            Opening::Thinking { fresh } => {
                if self.parser.is_thinking() {
                    self.opening = Opening::Thinking { fresh };
                } else {
                    self.grammar = Some(fresh);
                }
            }
            Opening::Possible { start, end, mut written, grammar_follows, fresh, mask } => {
                written.extend_from_slice(&spelling);
                let follows = grammar_follows && has(&mask, id);
                if start.as_bytes() == written {
                    self.opening = Opening::Thinking { fresh };
                } else {
                    if let Some(grammar) = self.grammar.as_mut().filter(|_| follows) {
                        grammar.accept(id)?;
                    }
                    if start.as_bytes().starts_with(&written) {
                        self.opening = Opening::Possible { start, end, written, grammar_follows: follows, fresh, mask };
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
        matches!(self.opening, Opening::Closed)
            && self.forced.is_empty()
            && self.grammar.as_ref().is_some_and(Constraint::is_complete)
    }
}
