//! The tokenizer of a GGUF file.

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

/// The values of `tokenizer.ggml.model` that are implemented.
pub(crate) const MODELS: &[&str] = &["llama", "gpt2", "gemma4", "whitespace", "t5", "bert", "rwkv"];

/// Pre-tokenizers of vocabularies with a separator between two texts: those of `RoBERTa`.
const SEPARATED: [&str; 3] = ["jina-v1-en", "jina-v2-code", "roberta-bpe"];

/// How to build a [`Tokenizer`].
#[derive(Debug, Clone, Default)]
pub struct TokenizerOptions {
    /// Use this pre-tokenizer instead of `tokenizer.ggml.pre`. Only byte-pair vocabularies have one.
    pub pre: Option<String>,
}

/// How to encode a text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Add BOS and EOS (for BERT CLS and SEP) as the vocabulary's metadata says.
    pub add_special: bool,
    /// Turn the text of control tokens into those tokens. Without it a user's `<|im_end|>` stays
    /// plain text. User-defined tokens are recognised either way.
    pub parse_special: bool,
}

/// Turns text into token ids and back, as the model in a GGUF file was trained to read it.
#[allow(clippy::struct_excessive_bools)] // independent switches of the file
pub struct Tokenizer {
    pub(crate) vocabulary: Vocabulary,
    pub(crate) algorithm: Algorithm,
    /// Every special token, and those that are special in any text.
    all_special: SpecialTokens,
    user_defined: SpecialTokens,
    /// Those that are not.
    control: ControlTokens,
    /// What each token writes, control tokens included.
    pieces: Pieces,
    add_bos: bool,
    add_eos: bool,
    add_separator: bool,
    pub(crate) add_space_prefix: bool,
    model: String,
    pre: String,
}

/// How the text between special tokens becomes tokens.
pub(crate) enum Algorithm {
    Spm(Spm),
    Bpe(Bpe),
    Unigram(Unigram),
    WordPiece(WordPiece),
    Rwkv(Rwkv),
}

impl Tokenizer {
    /// Builds the tokenizer that a file's `tokenizer.ggml.*` keys describe; the file may hold nothing else.
    ///
    /// What the keys mean, and which defaults they have, follows llama.cpp (`src/llama-vocab.cpp`).
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
        // XLM-RoBERTa's vocabularies are those of kind t5 that begin a text; files of theirs may be silent about pairs.
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

    /// The token ids of `text`. Takes time linear in its length.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<TokenId> {
        self.encode_with_literals(text, &[], options)
    }

    /// [`encode`](Self::encode), except that no control token covers a byte of `text` whose offset is one of
    /// `literals` (in ascending order). So a text made of trusted and other parts keeps the control tokens of the
    /// former alone: where [`control_starts`](Self::control_starts) finds something in the other parts, it is literal.
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

    /// The byte offsets in `text` where the spelling of a control token starts, or may start if the text went on.
    pub fn control_starts(&self, text: &str) -> Vec<usize> {
        self.control.starts(text)
    }

    /// The text of `ids`; control tokens are left out unless `special`. Invalid UTF-8 becomes U+FFFD.
    ///
    /// The leading blank that the encoder adds to a text is dropped again.
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

    /// A streaming decoder at the start of a text.
    pub fn decoder(&self) -> StreamDecoder<'_> {
        StreamDecoder::new(self)
    }

    /// The bytes that one token adds to a text; empty for control tokens and ids out of range.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        if self.is_control(id) { &[] } else { self.pieces.bytes(id) }
    }

    /// The bytes of a token, those of control tokens' spelling included.
    pub(crate) fn special_bytes(&self, id: TokenId) -> &[u8] {
        self.pieces.bytes(id)
    }

    /// Whether the encoder adds a blank before a text.
    pub(crate) fn starts_with_blank(&self) -> bool {
        self.add_space_prefix || matches!(self.algorithm, Algorithm::WordPiece(_))
    }

    /// The token's own spelling, such as `<|im_end|>` or `Ġthe`.
    pub fn token_text(&self, id: TokenId) -> Option<&str> {
        self.vocabulary.ids().contains(&id).then(|| self.vocabulary.text(id))
    }

    /// The token with exactly this spelling.
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.vocabulary.find(text.as_bytes())
    }

    /// Whether a token steers the model (BOS, ends of turns, the unknown token) and writes nothing.
    pub fn is_control(&self, id: TokenId) -> bool {
        self.vocabulary.is(id, CONTROL | UNKNOWN)
    }

    /// The number of tokens.
    pub fn n_vocab(&self) -> usize {
        self.vocabulary.len()
    }

    /// The token that begins a text (for BERT: CLS).
    pub fn bos(&self) -> Option<TokenId> {
        self.vocabulary.roles.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<TokenId> {
        self.vocabulary.roles.eos
    }

    /// The token that stands for what no other token covers.
    pub fn unknown(&self) -> Option<TokenId> {
        self.vocabulary.roles.unknown
    }

    /// The token between two texts that are read together (for BERT: SEP).
    pub fn separator(&self) -> Option<TokenId> {
        self.vocabulary.roles.separator
    }

    /// Whether [`EncodeOptions::add_special`] puts BOS first.
    pub fn adds_bos(&self) -> bool {
        self.add_bos || matches!(self.algorithm, Algorithm::WordPiece(_))
    }

    /// The token that [`EncodeOptions::add_special`] puts last: EOS, for BERT SEP.
    pub(crate) fn last(&self) -> Option<TokenId> {
        match &self.algorithm {
            Algorithm::WordPiece(_) => self.vocabulary.roles.separator,
            Algorithm::Spm(_) | Algorithm::Bpe(_) | Algorithm::Unigram(_) | Algorithm::Rwkv(_) => {
                self.vocabulary.roles.eos.filter(|_| self.add_eos)
            }
        }
    }

    /// Whether a separator comes between two texts that are read together, besides the token that ends the first.
    pub fn adds_separator(&self) -> bool {
        self.add_separator
    }

    /// The tokens of fill-in-the-middle prompts; `None` where the vocabulary lacks one that such a prompt needs.
    pub fn fill_in_the_middle(&self) -> Option<FillInTheMiddle> {
        self.vocabulary.fill_in_the_middle()
    }

    /// Whether a generation ends with this token.
    pub fn is_end_of_generation(&self, id: TokenId) -> bool {
        self.vocabulary.end_of_generation.binary_search(&id).is_ok()
    }

    /// The tokens that end a generation, in ascending order: EOS, ends of turns and messages, and
    /// what separates files and repositories in fill-in-the-middle training.
    pub fn end_of_generation(&self) -> &[TokenId] {
        &self.vocabulary.end_of_generation
    }

    /// The kind of vocabulary: "llama", "gpt2", "gemma4", "whitespace", "t5", "bert" or "rwkv".
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The pre-tokenizer's name, such as "smollm"; "default" where the file names none.
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

/// What every token writes.
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

/// The bytes of all tokens in one allocation.
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

    /// The bytes of a token, none for an id out of range.
    fn bytes(&self, id: TokenId) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }
}
