//! Pictures in prompts: [`PictureEncoder`] turns a picture into rows of embeddings, and [`PromptBuilder`] puts them among the tokens
//! of a text.

use std::sync::Arc;

use metal_attention_gguf::GgufFile;
use metal_attention_model::vision::{
    EncodedPicture, PictureAttention, PictureMarkers, Pixels, PromptPart, VisionModel,
};
use metal_attention_model::{Mask, ModelSpec, Position};
use metal_attention_pictures::{Picture, Preprocessing, normalised};
use metal_attention_tokenizer::{EncodeOptions, Tokenizer};
use sha2::{Digest, Sha256};

use crate::model::fingerprint;
use crate::prompt::{ContentHash, PromptSpan, SpanContent};
use crate::{EngineOptions, Error};

/// An encoder of pictures on a device.
pub trait PictureEncoderPass: Send {
    /// Encodes pictures, all together.
    ///
    /// # Errors
    ///
    /// Memory that the device lacks, or a cancelled watch.
    fn encode(&mut self, pictures: &[Pixels<'_>]) -> Result<Vec<EncodedPicture>, Error>;
}

/// The pictures of a text model: an `mmproj` file, set up on a device.
pub struct PictureEncoder {
    /// How a picture becomes the pictures that the encoder reads.
    preprocessing: Preprocessing,
    mean: [f32; 3],
    std: [f32; 3],
    markers: PictureMarkers,
    attention: PictureAttention,
    /// Width of a row of embeddings.
    n_embd: usize,
    /// Rows that are added after the first layers.
    n_deepstack: usize,
    pass: Box<dyn PictureEncoderPass>,
    /// Identifies the file and the settings.
    digest: [u8; 32],
}

/// A picture in rows of embeddings, with its place in a prompt.
#[derive(Debug, Clone)]
pub struct EncodedPrompt {
    /// Texts and rows, in their order.
    pub parts: Vec<PromptPart>,
    /// The rows of each entry (the picture, or a tile), which [`PromptPart::Rows`] names.
    pub entries: Vec<PictureRows>,
}

/// The rows of one entry.
#[derive(Debug, Clone)]
pub struct PictureRows {
    /// What the encoder returned: rows, and the columns and rows of their grid.
    pub encoded: EncodedPicture,
    /// What the rows are known by.
    pub hash: ContentHash,
}

/// Limits of a picture in tokens, for encoders that keep its size; `None`: the model's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TokenLimits {
    /// Fewest tokens.
    pub min: Option<usize>,
    /// Most tokens.
    pub max: Option<usize>,
}

impl PictureEncoder {
    /// Sets up the encoder of an `mmproj` file for a text model.
    ///
    /// # Errors
    ///
    /// The file has no encoder of a known family, or its rows do not fit the text model; memory or threads that the system
    /// refuses; a cancelled watch.
    pub fn new(file: &GgufFile, text: &ModelSpec, options: &EngineOptions, limits: TokenLimits) -> Result<Self, Error> {
        let VisionModel { mut preprocessing, mean, std, encoder, markers, attention } = VisionModel::from_gguf(file)?;
        preprocessing.limit_tokens(limits.min, limits.max)?;
        let (n_embd, n_deepstack) = (encoder.n_embd, encoder.n_deepstack);
        if n_embd != text.n_embd {
            return Err(Error::OtherPictureWidth { found: n_embd, expected: text.n_embd });
        }
        let digest = Sha256::new_with_prefix(fingerprint(file)).chain_update(format!("{preprocessing:?}")).finalize();
        let pass = options.open_encoder(file)?;
        Ok(Self { preprocessing, mean, std, markers, attention, n_embd, n_deepstack, pass, digest: digest.into() })
    }

    /// Elements of a row: of its embedding and of what is added after the first layers.
    pub fn row_width(&self) -> usize {
        (1 + self.n_deepstack) * self.n_embd
    }

    /// Encodes a picture for a model with this tokenizer.
    ///
    /// # Errors
    ///
    /// Those of the device, and a picture whose sides have too extreme a ratio.
    pub fn encode(&mut self, picture: &Picture, tokenizer: &Tokenizer) -> Result<EncodedPrompt, Error> {
        let division = self.preprocessing.apply(picture)?;
        let values: Vec<Vec<f32>> =
            division.entries.iter().map(|entry| normalised(&entry.picture, self.mean, self.std)).collect();
        let pixels: Vec<_> = division
            .entries
            .iter()
            .zip(&values)
            .map(|(entry, values)| Pixels { values, width: entry.picture.width(), height: entry.picture.height() })
            .collect();
        let encoded = self.pass.encode(&pixels)?;
        let of_picture = picture.digest();
        let hash = |i: usize| {
            let hash = Sha256::new_with_prefix(self.digest).chain_update(of_picture).chain_update(i.to_le_bytes());
            ContentHash(hash.finalize().into())
        };
        let entries =
            encoded.into_iter().enumerate().map(|(i, encoded)| PictureRows { encoded, hash: hash(i) }).collect();
        let places: Vec<_> = division.entries.iter().map(|entry| entry.place).collect();
        Ok(EncodedPrompt {
            parts: self.markers.parts(&places, division.columns, |text| token_of(tokenizer, text).is_some()),
            entries,
        })
    }

    /// What a text model reads of rows: each row's embedding, rows that are added after the first layers, positions by row and
    /// column in models whose rotation has sections, and in which layers the rows attend to each other.
    pub fn span_content(&self, rows: &PictureRows, text: &ModelSpec) -> SpanContent {
        let PictureRows { encoded, hash } = rows;
        let width = self.row_width();
        let columns = |i: usize| -> Vec<f32> {
            let parts = encoded.rows.chunks_exact(width).map(|row| &row[i * self.n_embd..][..self.n_embd]);
            parts.flatten().copied().collect()
        };
        let has_sections =
            text.layers.iter().any(|layer| layer.mixer.rope().is_some_and(|rope| rope.sections.is_some()));
        let n_rows = encoded.rows.len() / width;
        let nx = encoded.nx.max(1) as u32;
        let position = |i: u32| Position([0, i / nx, i % nx]);
        let bidirectional_in = match self.attention {
            PictureAttention::Causal => Vec::new(),
            PictureAttention::Bidirectional => vec![true; text.n_layer()],
            PictureAttention::BidirectionalInWindows => text
                .layers
                .iter()
                .map(|layer| layer.mixer.attention().is_some_and(|attention| has_window(attention.mask)))
                .collect(),
        };
        SpanContent {
            hash: *hash,
            rows: columns(0),
            deepstack: (1..=self.n_deepstack).map(columns).collect(),
            positions: if has_sections { (0..n_rows as u32).map(position).collect() } else { Vec::new() },
            bidirectional_in,
        }
    }
}

/// The token that stands for all of `text`, also a single byte of a SentencePiece vocabulary; the first if there are several.
fn token_of(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    let by_bytes = || (0..tokenizer.n_vocab() as u32).find(|&id| tokenizer.token_bytes(id) == text.as_bytes());
    tokenizer.token_id(text).or_else(by_bytes)
}

/// Whether a mask limits how far back attention reaches.
fn has_window(mask: Mask) -> bool {
    match mask {
        Mask::Causal | Mask::Full => false,
        Mask::Window(_) | Mask::Chunk(_) | Mask::SymmetricWindow(_) => true,
    }
}

/// A prompt of texts and pictures under construction.
pub struct PromptBuilder<'a> {
    tokenizer: &'a Tokenizer,
    /// An id for each input; 0 in the place of rows.
    ids: Vec<u32>,
    spans: Vec<PromptSpan>,
}

impl<'a> PromptBuilder<'a> {
    /// An empty prompt.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), spans: Vec::new() }
    }

    /// Appends a text in which control tokens count, but for those that begin at the bytes `literals`.
    pub fn text(&mut self, text: &str, literals: &[usize]) {
        let options = EncodeOptions { add_special: false, parse_special: true };
        self.ids.extend(self.tokenizer.encode_with_literals(text, literals, options));
    }

    /// Appends a picture.
    pub fn picture(&mut self, encoder: &PictureEncoder, picture: &EncodedPrompt, text: &ModelSpec) {
        for part in &picture.parts {
            match part {
                PromptPart::Text(text) => self.text(text, &[]),
                PromptPart::Token(text) => self.ids.extend(token_of(self.tokenizer, text)),
                PromptPart::Rows(i) => {
                    let content = encoder.span_content(&picture.entries[*i], text);
                    let start = self.ids.len();
                    self.ids.resize(start + content.rows.len() / text.n_embd, 0);
                    let inputs = start..self.ids.len();
                    self.spans.push(PromptSpan { inputs, content: Arc::new(content) });
                }
            }
        }
    }

    /// The ids and spans of the prompt. BOS is put first if the model wants it and the prompt does not begin with it.
    pub fn finish(mut self) -> (Vec<u32>, Vec<PromptSpan>) {
        let begins_with = self.ids.first().filter(|_| self.spans.first().is_none_or(|span| span.inputs.start > 0));
        let bos = self.tokenizer.bos().filter(|bos| self.tokenizer.adds_bos() && begins_with != Some(bos));
        if let Some(bos) = bos {
            self.ids.insert(0, bos);
            for span in &mut self.spans {
                span.inputs = span.inputs.start + 1..span.inputs.end + 1;
            }
        }
        (self.ids, self.spans)
    }
}
