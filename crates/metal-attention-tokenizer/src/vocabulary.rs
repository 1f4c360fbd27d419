//! The tokens of a vocabulary, read from `tokenizer.ggml.*`: spelling, kinds and score of each, and the tokens with a
//! role (BOS, EOS, fill-in-the-middle, end of generation). The algorithms look tokens up here.

use crate::TokenId;
use crate::error::TokenizerError;
use crate::strings::StringTable;
use metal_attention_gguf::Metadata;
use std::borrow::Cow;
use std::ops::Range;

/// The kinds of a token, as a set of bits. `tokenizer.ggml.token_type` sets one of them; a well-known spelling, such
/// as `<|im_end|>`, adds [`CONTROL`] whatever the file says.
pub(crate) type TokenKinds = u8;
pub(crate) const NORMAL: TokenKinds = 1 << 0;
pub(crate) const UNKNOWN: TokenKinds = 1 << 1;
pub(crate) const CONTROL: TokenKinds = 1 << 2;
pub(crate) const USER_DEFINED: TokenKinds = 1 << 3;
pub(crate) const BYTE: TokenKinds = 1 << 4;
/// Unused, or of a kind that is not known: decodes to nothing.
pub(crate) const UNUSED: TokenKinds = 1 << 5;
/// White space to the left is consumed with the token.
pub(crate) const STRIP_LEFT: TokenKinds = 1 << 6;
/// White space to the right is consumed with the token.
pub(crate) const STRIP_RIGHT: TokenKinds = 1 << 7;

/// "▁" (U+2581), the spelling of the blank in many vocabularies.
pub(crate) const ESCAPED_BLANK: &str = "\u{2581}";

/// The maximum size in bytes of all spellings, and of all merges: offsets into them are 32-bit.
pub(crate) const MAX_BYTES: usize = u32::MAX as usize / 2;

/// The maximum length in bytes of a token that is searched for at every position of a text: every token, except those
/// that byte-pair encoding makes by merges. Real vocabularies have at most 100.
const MAX_TOKEN_BYTES: usize = 1024;
/// The maximum size in bytes of all such tokens together. Real vocabularies have a few MiB.
const MAX_LOOKED_FOR: usize = 16 << 20;

/// Spellings of tokens that end a generation, whatever the metadata says.
const END_OF_GENERATION: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// The fill-in-the-middle roles. For each: the metadata keys that name its token, the spellings by which the token is
/// found otherwise, and whether it ends a generation.
const FILL_IN_THE_MIDDLE: [(&[&str], &[&str], bool); 6] = [
    (
        &["tokenizer.ggml.prefix_token_id", "tokenizer.ggml.fim_pre_token_id"],
        &[
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ],
        false,
    ),
    (
        &["tokenizer.ggml.suffix_token_id", "tokenizer.ggml.fim_suf_token_id"],
        &[
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ],
        false,
    ),
    (
        &["tokenizer.ggml.middle_token_id", "tokenizer.ggml.fim_mid_token_id"],
        &[
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ],
        false,
    ),
    (&["tokenizer.ggml.fim_pad_token_id"], &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"], true),
    (
        &["tokenizer.ggml.fim_rep_token_id"],
        &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
        true,
    ),
    (&["tokenizer.ggml.fim_sep_token_id"], &["<|file_sep|>"], true),
];

/// Tokens of gpt-oss that mark its visible channels, so that they are decoded although the file calls them control
/// tokens.
const ALWAYS_SHOWN: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// The tokens with a role. As an argument of [`Vocabulary::read`]: the ids that the tokenizer model implies where the
/// metadata names none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TokenRoles {
    pub bos: Option<TokenId>,
    pub eos: Option<TokenId>,
    pub unknown: Option<TokenId>,
    pub separator: Option<TokenId>,
}

/// The tokens of a fill-in-the-middle prompt. The prompt is `prefix` A `suffix` B `middle`; the model then generates
/// the text between A and B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FillInTheMiddle {
    /// Stands before the text that precedes the gap.
    pub prefix: TokenId,
    /// Stands before the text that follows the gap.
    pub suffix: TokenId,
    /// Ends the prompt.
    pub middle: TokenId,
    /// Stands before the name of a repository; `None` where the vocabulary has no such token.
    pub repository: Option<TokenId>,
    /// Stands before the name of a file; `None` where the vocabulary has no such token.
    pub file: Option<TokenId>,
}

/// The tokens of a GGUF file and their roles.
pub(crate) struct Vocabulary {
    spellings: StringTable,
    kinds: Vec<TokenKinds>,
    scores: Vec<f32>,
    pub roles: TokenRoles,
    /// The tokens that end a generation, in ascending order.
    pub end_of_generation: Vec<TokenId>,
    /// The tokens of the roles of [`FILL_IN_THE_MIDDLE`], in that order; `None` where the vocabulary has none.
    fill_in_the_middle: [Option<TokenId>; 6],
}

impl Vocabulary {
    /// Reads the vocabulary from `tokenizer.ggml.*`. `defaults` are the role tokens of this tokenizer model.
    pub(crate) fn read(metadata: &Metadata, defaults: TokenRoles) -> Result<Self, TokenizerError> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let tokens = metadata.strings(TOKENS)?.ok_or(TokenizerError::MissingKey { key: TOKENS })?;
        let count = tokens.len();
        if count == 0 {
            return Err(TokenizerError::EmptyVocabulary);
        }
        let bytes = tokens.iter().map(str::len).sum();
        check_size("tokens", bytes, MAX_BYTES)?;
        let mut spellings = StringTable::with_capacity(count, bytes);
        for (i, text) in tokens.iter().enumerate() {
            if text.is_empty() {
                spellings.push(format!("[EMPTY_{i}]").as_bytes());
            } else {
                spellings.push(text.as_bytes());
            }
        }
        let mut vocabulary = Self {
            kinds: kinds(metadata, count)?,
            scores: scores(metadata, count)?,
            roles: defaults,
            end_of_generation: Vec::new(),
            fill_in_the_middle: [None; 6],
            spellings,
        };
        vocabulary.read_roles(metadata)?;
        vocabulary.find_end_of_generation(metadata)?;
        vocabulary.read_strip(metadata)?;
        Ok(vocabulary)
    }

    /// The fill-in-the-middle tokens; `None` if the prefix, suffix or middle token is missing.
    pub(crate) fn fill_in_the_middle(&self) -> Option<FillInTheMiddle> {
        let [prefix, suffix, middle, _, repository, file] = self.fill_in_the_middle;
        Some(FillInTheMiddle { prefix: prefix?, suffix: suffix?, middle: middle?, repository, file })
    }

    pub(crate) fn len(&self) -> usize {
        self.spellings.len()
    }

    pub(crate) fn ids(&self) -> Range<TokenId> {
        0..self.len() as TokenId
    }

    /// The spelling of a token; empty for an id out of range.
    pub(crate) fn text(&self, id: TokenId) -> &str {
        std::str::from_utf8(self.spellings.bytes(id)).unwrap_or_default()
    }

    /// The spelling of a token as bytes; empty for an id out of range.
    pub(crate) fn bytes(&self, id: TokenId) -> &[u8] {
        self.spellings.bytes(id)
    }

    /// The kinds of a token; [`UNUSED`] for an id out of range.
    pub(crate) fn kind(&self, id: TokenId) -> TokenKinds {
        self.kinds.get(id as usize).copied().unwrap_or(UNUSED)
    }

    /// Whether a token is of one of `kinds`.
    pub(crate) fn is(&self, id: TokenId, kinds: TokenKinds) -> bool {
        self.kind(id) & kinds != 0
    }

    /// The score of a token; 0 for an id out of range and for a vocabulary without scores.
    pub(crate) fn score(&self, id: TokenId) -> f32 {
        self.scores.get(id as usize).copied().unwrap_or(0.0)
    }

    /// The token with exactly this spelling; of equal spellings the last token.
    pub(crate) fn find(&self, text: &[u8]) -> Option<TokenId> {
        self.spellings.get(text)
    }

    /// The token with this spelling, if user text may become it: not a control, unknown or byte token.
    pub(crate) fn find_in_text(&self, text: &[u8]) -> Option<TokenId> {
        self.find(text).filter(|&id| !self.is(id, CONTROL | UNKNOWN | BYTE))
    }

    /// The byte-fallback token of a byte, such as `<0x0A>`.
    pub(crate) fn find_byte(&self, byte: u8) -> Option<TokenId> {
        self.find(format!("<0x{byte:02X}>").as_bytes())
    }

    /// The length in bytes of the longest spelling.
    pub(crate) fn longest(&self) -> usize {
        self.ids().map(|id| self.spellings.bytes(id).len()).max().unwrap_or(0)
    }

    /// Checks that the tokens of these kinds are short enough, each and in total, to be searched for at every position
    /// of a text.
    pub(crate) fn check_lengths(&self, kinds: TokenKinds) -> Result<(), TokenizerError> {
        let mut total = 0;
        for id in self.ids().filter(|&id| self.is(id, kinds)) {
            let bytes = self.bytes(id).len();
            if bytes > MAX_TOKEN_BYTES {
                return Err(TokenizerError::TokenTooLong { id, bytes, limit: MAX_TOKEN_BYTES });
            }
            total += bytes;
        }
        check_size("tokens", total, MAX_LOOKED_FOR)
    }

    /// The byte of a byte-fallback token such as `<0x0A>`; `None` for other spellings.
    pub(crate) fn byte_of(&self, id: TokenId) -> Option<u8> {
        let hex = self.text(id).strip_prefix("<0x")?.strip_suffix('>')?;
        u8::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 2)
    }

    /// The token that a metadata key names. An id out of range is logged and ignored.
    pub(crate) fn read_role(&self, metadata: &Metadata, key: &str) -> Result<Option<TokenId>, TokenizerError> {
        let Some(id) = metadata.u32(key)? else { return Ok(None) };
        if (id as usize) < self.len() {
            return Ok(Some(id));
        }
        tracing::warn!(key, id, tokens = self.len(), "ignored: there is no such token");
        Ok(None)
    }

    fn read_roles(&mut self, metadata: &Metadata) -> Result<(), TokenizerError> {
        let read = |default: Option<TokenId>, key| {
            let default = default.filter(|&id| (id as usize) < self.len());
            Ok::<_, TokenizerError>(self.read_role(metadata, key)?.or(default))
        };
        self.roles = TokenRoles {
            bos: read(self.roles.bos, "tokenizer.ggml.bos_token_id")?,
            eos: read(self.roles.eos, "tokenizer.ggml.eos_token_id")?,
            unknown: read(self.roles.unknown, "tokenizer.ggml.unknown_token_id")?,
            // The GGUF format itself misspells this key ("seperator"); both spellings are read.
            separator: read(
                read(self.roles.separator, "tokenizer.ggml.separator_token_id")?,
                "tokenizer.ggml.seperator_token_id",
            )?,
        };
        Ok(())
    }

    /// Finds the tokens that end a generation, by metadata keys and by spelling. Tokens found by spelling become
    /// control tokens.
    fn find_end_of_generation(&mut self, metadata: &Metadata) -> Result<(), TokenizerError> {
        let mut ends: Vec<TokenId> = self.roles.eos.into_iter().collect();
        for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
            ends.extend(self.read_role(metadata, key)?);
        }
        for (role, (keys, spellings, ends_generation)) in FILL_IN_THE_MIDDLE.into_iter().enumerate() {
            let mut token = None;
            for key in keys {
                token = self.read_role(metadata, key)?.or(token);
            }
            if token.is_none() {
                token = spellings.iter().find_map(|text| self.find(text.as_bytes()));
                self.make_control(token);
            }
            ends.extend(token.filter(|_| ends_generation));
            self.fill_in_the_middle[role] = token;
        }
        for text in END_OF_GENERATION {
            let token = self.find(text.as_bytes());
            self.make_control(token);
            ends.extend(token);
        }
        for text in ALWAYS_SHOWN {
            if let Some(id) = self.find(text.as_bytes()) {
                self.kinds[id as usize] = USER_DEFINED;
            }
        }
        let has = |text: &str| self.find(text.as_bytes()).is_some_and(|id| ends.contains(&id));
        let mut not_ends = Vec::new();
        // Where tool calls and returns have tokens of their own (gpt-oss), <|end|> ends a message, not the generation.
        let calls = has("<|call|>") || has("<|calls|>");
        if calls && (has("<|return|>") || has("<|flush|>")) && has("<|end|>") {
            not_ends.push(("<|end|>", USER_DEFINED));
        }
        // In Gemma 4's vocabulary </s> is an ordinary token.
        if has("<|tool_response>") && has("</s>") {
            not_ends.push(("</s>", NORMAL));
        }
        for (text, kind) in not_ends {
            if let Some(id) = self.find(text.as_bytes()) {
                ends.retain(|&end| end != id);
                self.kinds[id as usize] = kind;
            }
        }
        ends.sort_unstable();
        ends.dedup();
        self.end_of_generation = ends;
        Ok(())
    }

    fn make_control(&mut self, id: Option<TokenId>) {
        if let Some(id) = id {
            self.kinds[id as usize] |= CONTROL;
        }
    }

    /// Marks the special tokens that consume white space beside them. GGUF files do not record this; it depends on the
    /// model.
    fn read_strip(&mut self, metadata: &Metadata) -> Result<(), TokenizerError> {
        let text = |key| metadata.str(key).map(|text| text.unwrap_or_default().to_lowercase());
        let name = text("general.name")?;
        let pre = text("tokenizer.ggml.pre")?;
        let architecture = text("general.architecture")?;
        let any = |text: &str, parts: &[&str]| parts.iter().any(|part| text.contains(part));

        let mask = if any(&pre, &["jina-v2-de", "jina-v2-es", "jina-v2-code"])
            || any(&architecture, &["nomic-bert-moe", "jina-bert-v3"])
        {
            "<mask>"
        } else if any(&name, &["phi-3", "phi3"]) {
            for id in self.ids().filter(|&id| self.is_special(id)).collect::<Vec<_>>() {
                if !["<unk>", "<s>", "<|endoftext|>"].contains(&self.text(id)) {
                    self.kinds[id as usize] |= STRIP_RIGHT;
                }
            }
            return Ok(());
        } else if any(&name, &["modern-bert"]) {
            "[MASK]"
        } else {
            return Ok(());
        };
        if let Some(id) = self.find(mask.as_bytes()) {
            self.kinds[id as usize] |= STRIP_LEFT;
        }
        Ok(())
    }

    /// Whether the token is split off the text before the algorithm runs.
    pub(crate) fn is_special(&self, id: TokenId) -> bool {
        self.is(id, CONTROL | UNKNOWN | USER_DEFINED)
    }

    /// The bytes that a token decodes to in a vocabulary where "▁" means the blank. Control tokens give their
    /// spelling.
    pub(crate) fn unescaped(&self, id: TokenId) -> Cow<'_, [u8]> {
        let text = self.text(id);
        let kind = self.kind(id);
        if kind & (CONTROL | UNKNOWN | USER_DEFINED) != 0 {
            Cow::Borrowed(text.as_bytes())
        } else if kind & BYTE != 0 {
            self.byte_of(id).map_or(Cow::Borrowed(text.as_bytes()), |b| Cow::Owned(vec![b]))
        } else if kind & NORMAL == 0 {
            Cow::Borrowed(&[])
        } else if text.contains(ESCAPED_BLANK) {
            Cow::Owned(text.replace(ESCAPED_BLANK, " ").into_bytes())
        } else {
            Cow::Borrowed(text.as_bytes())
        }
    }
}

/// Checks that `what` ("tokens" or "merges") takes at most `limit` bytes.
pub(crate) fn check_size(what: &'static str, bytes: usize, limit: usize) -> Result<(), TokenizerError> {
    if bytes > limit {
        return Err(TokenizerError::TooLarge { what, bytes, limit });
    }
    Ok(())
}

/// The kinds of `count` tokens; all are normal tokens where the file has no `tokenizer.ggml.token_type`.
fn kinds(metadata: &Metadata, count: usize) -> Result<Vec<TokenKinds>, TokenizerError> {
    const KEY: &str = "tokenizer.ggml.token_type";
    let Some(types) = metadata.i32s(KEY)? else { return Ok(vec![NORMAL; count]) };
    check_len(KEY, types.len(), count)?;
    let kind = |&number: &i32| match number {
        1 => NORMAL,
        2 => UNKNOWN,
        3 => CONTROL,
        4 => USER_DEFINED,
        6 => BYTE,
        _ => UNUSED,
    };
    Ok(types.iter().take(count).map(kind).collect())
}

/// The scores of `count` tokens; empty where the file has none.
fn scores(metadata: &Metadata, count: usize) -> Result<Vec<f32>, TokenizerError> {
    const KEY: &str = "tokenizer.ggml.scores";
    if metadata.get(KEY).is_none() {
        return Ok(Vec::new());
    }
    let mut scores = match metadata.i32s(KEY) {
        Ok(Some(scores)) => scores.into_iter().map(|score| score as f32).collect(),
        _ => metadata.f32s(KEY)?.unwrap_or_default(),
    };
    check_len(KEY, scores.len(), count)?;
    scores.truncate(count);
    Ok(scores)
}

fn check_len(key: &'static str, found: usize, tokens: usize) -> Result<(), TokenizerError> {
    if found < tokens { Err(TokenizerError::ShortList { key, found, tokens }) } else { Ok(()) }
}
