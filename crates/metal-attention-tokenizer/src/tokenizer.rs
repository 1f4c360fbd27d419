//! [`Tokenizer`]: selects the algorithm of a GGUF file's vocabulary and runs it on the text between special tokens.

use crate::TokenId;
use crate::bpe::Bpe;
use crate::decode::StreamDecoder;
use crate::error::TokenizerError;
use crate::pre::{self, Bos};
use crate::rwkv::Rwkv;
use crate::special::{ControlTokens, Fragment, SpecialTokens};
use crate::spm::Spm;
use crate::unigram::Unigram;
use crate::vocabulary::{CONTROL, FillInTheMiddle, TokenRoles, UNKNOWN, USER_DEFINED, Vocabulary};
use crate::wordpiece::WordPiece;
use metal_attention_gguf::Metadata;
use std::borrow::Cow;

/// The values of `tokenizer.ggml.model` that are supported.
pub(crate) const MODELS: &[&str] = &["llama", "gpt2", "gemma4", "whitespace", "t5", "bert", "rwkv"];

/// Pre-tokenizers of vocabularies that put a separator between the two texts of a pair: those of `RoBERTa`.
const SEPARATED: [&str; 3] = ["jina-v1-en", "jina-v2-code", "roberta-bpe"];

/// Options for building a [`Tokenizer`].
#[derive(Debug, Clone, Default)]
pub struct TokenizerOptions {
    /// Overrides `tokenizer.ggml.pre`. Only byte-pair vocabularies have a pre-tokenizer.
    pub pre: Option<String>,
}

/// Options for encoding a text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Adds BOS and EOS (for BERT: CLS and SEP) where the vocabulary's metadata says so.
    pub add_special: bool,
    /// Recognises the spelling of control tokens in the text. If false, a user's `<|im_end|>` stays plain text.
    /// User-defined tokens are recognised either way.
    pub parse_special: bool,
}

/// Encodes text to token ids and decodes ids to text, with the vocabulary of a GGUF file.
#[allow(clippy::struct_excessive_bools)] // independent switches of the file
pub struct Tokenizer {
    pub(crate) vocabulary: Vocabulary,
    pub(crate) algorithm: Algorithm,
    /// The special tokens that are recognised with `parse_special`: control, unknown and user-defined ones.
    all_special: SpecialTokens,
    /// The special tokens that are recognised in any text: user-defined ones.
    user_defined: SpecialTokens,
    /// The control and unknown tokens, to find their spellings in untrusted text.
    control: ControlTokens,
    /// The bytes of each token, as decoded. Those of a control token are its spelling.
    pieces: Pieces,
    add_bos: bool,
    add_eos: bool,
    add_separator: bool,
    pub(crate) add_space_prefix: bool,
    model: String,
    pre: String,
}

/// The algorithm that encodes the text between special tokens.
pub(crate) enum Algorithm {
    Spm(Spm),
    Bpe(Bpe),
    Unigram(Unigram),
    WordPiece(WordPiece),
    Rwkv(Rwkv),
}

impl Tokenizer {
    /// Builds the tokenizer from `tokenizer.ggml.*` keys; other keys are optional.
    ///
    /// The meaning of the keys and their defaults are those of llama.cpp (`src/llama-vocab.cpp`).
    pub fn from_metadata(metadata: &Metadata, options: &TokenizerOptions) -> Result<Self, TokenizerError> {
        const MODEL: &str = "tokenizer.ggml.model";
        let model = metadata.str(MODEL)?.ok_or(TokenizerError::MissingKey { key: MODEL })?;
        let mut add_space_prefix = false;
        let mut add_bos = false;
        let mut add_eos = false;
        let mut pre_name = "default".to_owned();
        let (vocabulary, algorithm) = match model {
            "llama" => {
                let roles = TokenRoles { bos: Some(1), eos: Some(2), unknown: Some(0), separator: None };
                let vocabulary = Vocabulary::read(metadata, roles)?;
                add_space_prefix = true;
                add_bos = true;
                let spm = Spm::new(&vocabulary)?;
                (vocabulary, Algorithm::Spm(spm))
            }
            "gpt2" | "gemma4" | "whitespace" => {
                pre_name = pre_tokenizer_name(metadata, model, options)?;
                let pre = pre::find(&pre_name).ok_or_else(|| TokenizerError::UnknownPre { pre: pre_name.clone() })?;
                let default = Some(11).filter(|_| model != "gemma4");
                let bos = default.filter(|_| !pre.no_default_bos);
                let roles = TokenRoles { bos, eos: default, unknown: None, separator: None };
                let vocabulary = Vocabulary::read(metadata, roles)?;
                add_bos = pre.bos == Bos::ByDefault;
                let bpe = Bpe::new(metadata, &vocabulary, pre)?;
                (vocabulary, Algorithm::Bpe(bpe))
            }
            "t5" => {
                let roles = TokenRoles { bos: None, eos: Some(1), unknown: Some(2), separator: None };
                let vocabulary = Vocabulary::read(metadata, roles)?;
                add_eos = true;
                let unigram = Unigram::new(metadata, &vocabulary)?;
                (vocabulary, Algorithm::Unigram(unigram))
            }
            "bert" => {
                let roles = TokenRoles { bos: Some(101), eos: None, unknown: Some(100), separator: Some(102) };
                let vocabulary = Vocabulary::read(metadata, roles)?;
                let wordpiece = WordPiece::new(metadata, &vocabulary)?;
                (vocabulary, Algorithm::WordPiece(wordpiece))
            }
            "rwkv" => {
                let vocabulary = Vocabulary::read(metadata, TokenRoles::default())?;
                let rwkv = Rwkv::new(&vocabulary)?;
                (vocabulary, Algorithm::Rwkv(rwkv))
            }
            _ => return Err(TokenizerError::UnknownModel { model: model.to_owned() }),
        };

        let flag = |key, default: bool| metadata.bool(key).map(|flag| flag.unwrap_or(default));
        add_space_prefix = flag("tokenizer.ggml.add_space_prefix", add_space_prefix)?;
        add_bos = flag("tokenizer.ggml.add_bos_token", add_bos)?
            || matches!(&algorithm, Algorithm::Bpe(bpe) if bpe.pre.bos == Bos::Always);
        add_eos = flag("tokenizer.ggml.add_eos_token", add_eos)?;
        // XLM-RoBERTa's vocabularies are those of model t5 that add BOS. Their files may lack the key for the
        // separator.
        let add_separator = model == "bert" || (model == "t5" && add_bos) || SEPARATED.contains(&pre_name.as_str());
        let add_separator = flag("tokenizer.ggml.add_sep_token", add_separator)?;

        vocabulary.check_lengths(CONTROL | UNKNOWN | USER_DEFINED)?;
        Ok(Self {
            all_special: SpecialTokens::new(&vocabulary, CONTROL | UNKNOWN | USER_DEFINED, 0),
            user_defined: SpecialTokens::new(&vocabulary, USER_DEFINED, CONTROL | UNKNOWN),
            control: ControlTokens::new(&vocabulary),
            pieces: pieces(&vocabulary, &algorithm),
            vocabulary,
            algorithm,
            add_bos,
            add_eos,
            add_separator,
            add_space_prefix,
            model: model.to_owned(),
            pre: pre_name,
        })
    }

    /// Encodes `text`. The time is linear in its length.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<TokenId> {
        self.encode_with_literals(text, &[], options)
    }

    /// Encodes a prompt that consists of trusted and untrusted parts. `literals` are byte offsets in `text`, in
    /// ascending order; no control token covers one of these bytes. A caller passes the offsets that
    /// [`control_starts`](Self::control_starts) finds in the untrusted parts, so that a control token's spelling there
    /// stays plain text.
    pub fn encode_with_literals(&self, text: &str, literals: &[usize], options: EncodeOptions) -> Vec<TokenId> {
        let special = if options.parse_special { &self.all_special } else { &self.user_defined };
        let mut out = Vec::with_capacity(text.len() / 4 + 2);
        if options.add_special && self.adds_bos() {
            out.extend(self.vocabulary.roles.bos);
        }
        let mut after_special = true;
        for fragment in special.cut(text, literals) {
            match fragment {
                Fragment::Token(id) => {
                    out.push(id);
                    after_special = true;
                }
                Fragment::Text(text) => {
                    let vocabulary = &self.vocabulary;
                    match &self.algorithm {
                        Algorithm::Spm(spm) => {
                            let prefix = self.add_space_prefix && after_special;
                            spm.encode(vocabulary, text, prefix, &mut out);
                        }
                        Algorithm::Bpe(bpe) => bpe.encode(vocabulary, text, &mut out),
                        Algorithm::Unigram(unigram) => unigram.encode(vocabulary, text, &mut out),
                        Algorithm::WordPiece(wordpiece) => wordpiece.encode(vocabulary, text, &mut out),
                        Algorithm::Rwkv(rwkv) => rwkv.encode(vocabulary, text, &mut out),
                    }
                    after_special = false;
                }
            }
        }
        if options.add_special {
            out.extend(self.last());
        }
        out
    }

    /// The byte offsets in `text`, ascending, where the spelling of a control token starts, or could start if more
    /// text followed.
    pub fn control_starts(&self, text: &str) -> Vec<usize> {
        self.control.starts(text)
    }

    /// Decodes `ids`. Control tokens are left out unless `special` is set. Bytes that are invalid UTF-8 become U+FFFD.
    ///
    /// The leading blank that the encoder adds is removed.
    pub fn decode(&self, ids: &[TokenId], special: bool) -> String {
        let mut decoder = self.decoder();
        if special {
            decoder = decoder.with_special();
        }
        let mut text = String::new();
        for &id in ids {
            decoder.push_to(id, &mut text);
        }
        text + &decoder.finish()
    }

    /// A decoder for token ids that arrive one by one, at the start of a text.
    pub fn decoder(&self) -> StreamDecoder<'_> {
        StreamDecoder::new(self)
    }

    /// The bytes that a token decodes to; empty for control tokens and for ids out of range.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        if self.is_control(id) { &[] } else { self.pieces.bytes(id) }
    }

    /// The bytes that a token decodes to, or the spelling of a control token.
    pub(crate) fn special_bytes(&self, id: TokenId) -> &[u8] {
        self.pieces.bytes(id)
    }

    /// Whether the encoder puts a blank before the text.
    pub(crate) fn starts_with_blank(&self) -> bool {
        self.add_space_prefix || matches!(self.algorithm, Algorithm::WordPiece(_))
    }

    /// The spelling of a token, such as `<|im_end|>` or `Ġthe`; `None` for an id out of range.
    pub fn token_text(&self, id: TokenId) -> Option<&str> {
        self.vocabulary.ids().contains(&id).then(|| self.vocabulary.text(id))
    }

    /// The token with exactly this spelling; `None` if there is none.
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.vocabulary.find(text.as_bytes())
    }

    /// Whether a token steers the model (BOS, ends of turns, the unknown token) and decodes to nothing.
    pub fn is_control(&self, id: TokenId) -> bool {
        self.vocabulary.is(id, CONTROL | UNKNOWN)
    }

    /// The number of tokens in the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.vocabulary.len()
    }

    /// The token that begins a text (BERT: CLS); `None` if the vocabulary has none.
    pub fn bos(&self) -> Option<TokenId> {
        self.vocabulary.roles.bos
    }

    /// The token that ends a text; `None` if the vocabulary has none.
    pub fn eos(&self) -> Option<TokenId> {
        self.vocabulary.roles.eos
    }

    /// The token for text that no other token covers; `None` if the vocabulary has none.
    pub fn unknown(&self) -> Option<TokenId> {
        self.vocabulary.roles.unknown
    }

    /// The token between the two texts of a pair (BERT: SEP); `None` if the vocabulary has none.
    pub fn separator(&self) -> Option<TokenId> {
        self.vocabulary.roles.separator
    }

    /// Whether [`EncodeOptions::add_special`] puts BOS first.
    pub fn adds_bos(&self) -> bool {
        self.add_bos || matches!(self.algorithm, Algorithm::WordPiece(_))
    }

    /// The token that [`EncodeOptions::add_special`] puts last: EOS, or SEP for BERT; `None` if it adds none.
    pub(crate) fn last(&self) -> Option<TokenId> {
        match &self.algorithm {
            Algorithm::WordPiece(_) => self.vocabulary.roles.separator,
            Algorithm::Spm(_) | Algorithm::Bpe(_) | Algorithm::Unigram(_) | Algorithm::Rwkv(_) => {
                self.vocabulary.roles.eos.filter(|_| self.add_eos)
            }
        }
    }

    /// Whether a separator token comes between the two texts of a pair, after the token that ends the first text.
    pub fn adds_separator(&self) -> bool {
        self.add_separator
    }

    /// The tokens of a fill-in-the-middle prompt; `None` if the prefix, suffix or middle token is missing.
    pub fn fill_in_the_middle(&self) -> Option<FillInTheMiddle> {
        self.vocabulary.fill_in_the_middle()
    }

    /// Whether this token ends a generation.
    pub fn is_end_of_generation(&self, id: TokenId) -> bool {
        self.vocabulary.end_of_generation.binary_search(&id).is_ok()
    }

    /// The tokens that end a generation, in ascending order: EOS, ends of turns and messages, and the separators of
    /// files and repositories in fill-in-the-middle training.
    pub fn end_of_generation(&self) -> &[TokenId] {
        &self.vocabulary.end_of_generation
    }

    /// The value of `tokenizer.ggml.model`: "llama", "gpt2", "gemma4", "whitespace", "t5", "bert" or "rwkv".
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The name of the pre-tokenizer, such as "smollm"; "default" if the file names none.
    pub fn pre(&self) -> &str {
        &self.pre
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("model", &self.model)
            .field("pre", &self.pre)
            .field("n_vocab", &self.n_vocab())
            .finish_non_exhaustive()
    }
}

/// The name of the pre-tokenizer of a byte-pair vocabulary, from the options or the file.
fn pre_tokenizer_name(metadata: &Metadata, model: &str, options: &TokenizerOptions) -> Result<String, TokenizerError> {
    if let Some(pre) = &options.pre {
        return Ok(pre.clone());
    }
    if model == "gemma4" {
        return Ok("gemma4".to_owned());
    }
    let name = metadata.str("tokenizer.ggml.pre")?.unwrap_or_default();
    if name.is_empty() {
        tracing::warn!("the file has no `tokenizer.ggml.pre`; text is split by the pre-tokenizer `default`");
        return Ok("default".to_owned());
    }
    Ok(name.to_owned())
}

/// The bytes that every token decodes to.
fn pieces(vocabulary: &Vocabulary, algorithm: &Algorithm) -> Pieces {
    let piece = |id| match algorithm {
        Algorithm::Bpe(bpe) => bpe.piece(vocabulary, id),
        Algorithm::Rwkv(_) => Cow::Owned(Rwkv::piece(vocabulary, id)),
        Algorithm::Spm(_) | Algorithm::Unigram(_) | Algorithm::WordPiece(_) => vocabulary.unescaped(id),
    };
    let mut pieces = Pieces::default();
    for id in vocabulary.ids() {
        let bytes: Cow<'_, [u8]> = piece(id);
        pieces.push(&bytes);
    }
    pieces
}

/// The bytes of all tokens, in one allocation. `ends[id]` is the offset after the bytes of token `id`.
#[derive(Default)]
struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Pieces {
    fn push(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
        self.ends.push(self.bytes.len() as u32);
    }

    /// The bytes of a token; empty for an id out of range.
    fn bytes(&self, id: TokenId) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }
}
