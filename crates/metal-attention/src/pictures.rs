//! Pictures in prompts: [`PictureEncoder`] turns a picture into rows of embeddings, and [`PromptBuilder`] puts them among the tokens
//! of a text.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use metal_attention_gguf::{GgufFile, Value};
use metal_attention_model::vision::{
    EncodedPicture, EncoderWork, PictureAttention, PictureMarkers, Pixels, PromptPart, VisionModel,
};
use metal_attention_model::{DeviceInfo, Mask, ModelError, ModelSpec, Position};
use metal_attention_pictures::{Division, Picture, Preprocessing};
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

    /// The operations of encoding pictures of these sizes, `[width, height]` in pixels.
    fn work(&self, pictures: &[[usize; 2]]) -> EncoderWork;

    /// The time of the matrix products of encoding pictures of these sizes, alone.
    ///
    /// # Errors
    ///
    /// Those of [`encode`](Self::encode).
    fn time_products(&mut self, pictures: &[[usize; 2]]) -> Result<Duration, Error>;

    /// The device.
    fn device(&self) -> DeviceInfo;
}

/// The pictures of a text model: an `mmproj` file, set up on a device.
pub struct PictureEncoder {
    divider: PictureDivider,
    markers: PictureMarkers,
    /// Width of a row of embeddings.
    n_embd: usize,
    /// Rows that are added after the first layers.
    n_deepstack: usize,
    /// Whether the text model's rotation has sections, so that rows have positions by row and column.
    has_sections: bool,
    /// The layers of the text model in which the rows of a picture attend to each other, `[n_layer]`; empty: none.
    bidirectional_in: Vec<bool>,
    pass: Box<dyn PictureEncoderPass>,
    /// Identifies the file and the settings.
    digest: [u8; 32],
}

/// How pictures become what an encoder reads: their size, and the tiles of large ones.
#[derive(Debug, Clone)]
pub struct PictureDivider(Arc<Preprocessing>);

/// A picture in the sizes that an encoder reads: tiles, and the whole.
#[derive(Debug)]
pub struct DividedPicture {
    division: Division,
    /// The digest of the picture's own pixels.
    digest: [u8; 32],
}

impl PictureDivider {
    /// Resizes and divides a picture.
    ///
    /// # Errors
    ///
    /// A picture whose sides have too extreme a ratio.
    pub fn divide(&self, picture: &Picture) -> Result<DividedPicture, Error> {
        Ok(DividedPicture { division: self.0.apply(picture)?, digest: picture.digest() })
    }
}

impl DividedPicture {
    /// Pixels that the encoder reads, in all tiles.
    pub fn n_pixels(&self) -> usize {
        self.division.entries.iter().map(|entry| entry.picture.width() * entry.picture.height()).sum()
    }

    /// [`Picture::digest`] of the picture: with one encoder, pictures of the same digest have the same rows.
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }
}

/// A picture as a part of prompts: markers and rows of embeddings, in their order.
#[derive(Debug, Clone)]
pub struct PicturePrompt {
    /// The parts.
    pub parts: Vec<PicturePart>,
}

/// A part of a [`PicturePrompt`].
#[derive(Debug, Clone)]
pub enum PicturePart {
    /// A text, which is tokenised by itself.
    Text(String),
    /// A token.
    Token(u32),
    /// The rows of the picture, or of a tile of it.
    Rows(PictureRows),
}

/// The rows of a picture, or of a tile.
#[derive(Debug, Clone)]
pub struct PictureRows {
    /// What the text model reads; prompts share it.
    pub content: Arc<SpanContent>,
    /// Number of rows.
    pub n_rows: usize,
    /// Columns of the grid of rows.
    pub nx: usize,
    /// Rows of the grid.
    pub ny: usize,
}

impl PicturePrompt {
    /// The rows of the picture, or of its tiles, in order.
    pub fn rows(&self) -> impl Iterator<Item = &PictureRows> {
        self.parts.iter().filter_map(|part| match part {
            PicturePart::Rows(rows) => Some(rows),
            PicturePart::Text(_) | PicturePart::Token(_) => None,
        })
    }

    /// Number of rows in all tiles.
    pub fn n_rows(&self) -> usize {
        self.rows().map(|rows| rows.n_rows).sum()
    }

    /// Bytes that its rows take, for caches.
    pub fn n_bytes(&self) -> usize {
        let floats = |content: &SpanContent| content.rows.len() + content.deepstack.iter().map(Vec::len).sum::<usize>();
        self.rows().map(|rows| size_of::<f32>() * floats(&rows.content)).sum()
    }
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
    /// Pixels that an encoder evaluates together, unless a single tile has more: 8192 patches of 16 x 16. More would not make
    /// products faster, but take more memory.
    pub const BATCH_PIXELS: usize = 1 << 21;

    /// Sets up the encoder of an `mmproj` file for a text model.
    ///
    /// # Errors
    ///
    /// The file has no encoder of a known family, or its rows do not fit the text model; memory or threads that the system
    /// refuses; a cancelled watch.
    pub fn new(file: &GgufFile, text: &ModelSpec, options: &EngineOptions, limits: TokenLimits) -> Result<Self, Error> {
        let VisionModel { mut preprocessing, encoder, markers, attention, has_grid_positions } =
            VisionModel::from_gguf(file)?;
        preprocessing.limit_tokens(limits.min, limits.max)?;
        let (n_embd, n_deepstack) = (encoder.n_embd, encoder.n_deepstack);
        if n_embd != text.n_embd {
            return Err(Error::OtherPictureWidth { found: n_embd, expected: text.n_embd });
        }
        let has_sections =
            text.layers.iter().any(|layer| layer.mixer.rope().is_some_and(|rope| rope.sections.is_some()));
        if has_sections && !has_grid_positions {
            return Err(Error::Model(ModelError::UnsupportedFeature {
                key: "rope.dimension_sections".into(),
                value: text.architecture.clone(),
                why: "pictures of this encoder have rows beside their grid, for which RoPE with sections is not implemented",
            }));
        }
        let digest = Sha256::new_with_prefix(fingerprint(file)).chain_update(format!("{preprocessing:?}")).finalize();
        Ok(Self {
            divider: PictureDivider(Arc::new(preprocessing)),
            markers,
            n_embd,
            n_deepstack,
            has_sections,
            bidirectional_in: bidirectional_in(attention, text),
            pass: options.open_encoder(file)?,
            digest: digest.into(),
        })
    }

    /// [`new`](Self::new) for the file at `path`, which is mapped: it must not be truncated or changed in place meanwhile.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new), and of reading the file.
    pub fn open(
        path: impl AsRef<Path>,
        text: &ModelSpec,
        options: &EngineOptions,
        limits: TokenLimits,
    ) -> Result<Self, Error> {
        // SAFETY: as `Model::open`: the caller does not change the file.
        let file = unsafe { GgufFile::map(path) }?;
        Self::new(&file, text, options, limits)
    }

    /// Bytes that the encoder of an `mmproj` file takes on its device: weights, and about those of the rows of a batch.
    pub fn memory_bytes(file: &GgufFile) -> u64 {
        let size = |key: &str| {
            let value = file.metadata().get(&format!("clip.vision.{key}")).and_then(Value::as_integer);
            value.and_then(|value| u64::try_from(value).ok()).unwrap_or(0)
        };
        let n_patches = Self::BATCH_PIXELS as u64 / size("patch_size").max(8).pow(2);
        // The widest rows of a block are those of its feed-forward; some more are those of the residual stream and attention.
        let width = size("feed_forward_length").saturating_add(size("embedding_length").saturating_mul(6));
        let rows = n_patches.saturating_mul(width).saturating_mul(size_of::<f32>() as u64);
        file.tensor_bytes().saturating_add(rows)
    }

    /// Elements of a row: of its embedding and of what is added after the first layers.
    pub fn row_width(&self) -> usize {
        (1 + self.n_deepstack) * self.n_embd
    }

    /// What makes a picture ready for this encoder; it may be used beside the encoder, in other threads.
    pub fn divider(&self) -> PictureDivider {
        self.divider.clone()
    }

    /// Encodes pictures for a model with this tokenizer. The encoder evaluates pictures and tiles together, 2 million pixels
    /// at a time. `advanced`: called after each of these batches with the operations of products so far, and of all;
    /// between, encoders on the CPU count them in the watch.
    ///
    /// # Errors
    ///
    /// Those of the device.
    pub fn encode(
        &mut self,
        pictures: &[DividedPicture],
        tokenizer: &Tokenizer,
        advanced: impl FnMut(u64, u64),
    ) -> Result<Vec<PicturePrompt>, Error> {
        let entries = pictures.iter().flat_map(|picture| &picture.division.entries);
        let entries: Vec<&Picture> = entries.map(|entry| &entry.picture).collect();
        let mut encoded = self.encode_entries(&entries, advanced)?.into_iter();
        let prompt = |DividedPicture { division, digest: of_picture }: &DividedPicture| {
            let places: Vec<_> = division.entries.iter().map(|entry| entry.place).collect();
            let mut rows: Vec<_> = encoded.by_ref().take(places.len()).map(Some).collect();
            let parts = self.markers.parts(&places, division.columns, |text| token_of(tokenizer, text).is_some());
            let part = |part: PromptPart| match part {
                PromptPart::Text(text) => Some(PicturePart::Text(text)),
                PromptPart::Token(text) => token_of(tokenizer, text).map(PicturePart::Token),
                PromptPart::Rows(i) => {
                    let hash =
                        Sha256::new_with_prefix(self.digest).chain_update(of_picture).chain_update(i.to_le_bytes());
                    let rows = rows.get_mut(i).and_then(Option::take).filter(|rows| !rows.rows.is_empty())?;
                    Some(PicturePart::Rows(self.rows(rows, ContentHash(hash.finalize().into()))))
                }
            };
            PicturePrompt { parts: parts.into_iter().filter_map(part).collect() }
        };
        Ok(pictures.iter().map(prompt).collect())
    }

    /// Runs the encoder over pictures that the preprocessing returned.
    fn encode_entries(
        &mut self,
        entries: &[&Picture],
        mut advanced: impl FnMut(u64, u64),
    ) -> Result<Vec<EncodedPicture>, Error> {
        let work = |pass: &dyn PictureEncoderPass, entries: &[&Picture]| {
            let sizes: Vec<_> = entries.iter().map(|picture| [picture.width(), picture.height()]).collect();
            pass.work(&sizes).products
        };
        let (mut done, total) = (0, work(&*self.pass, entries));
        advanced(done, total);
        let mut encoded = Vec::with_capacity(entries.len());
        let mut rest = entries;
        while !rest.is_empty() {
            let mut n_pixels = 0;
            let fits = |picture: &&&Picture| {
                n_pixels += picture.width() * picture.height();
                n_pixels <= Self::BATCH_PIXELS
            };
            let n = rest.iter().take_while(fits).count().max(1);
            let (batch, after) = rest.split_at(n);
            let pixels: Vec<_> = batch.iter().map(|&picture| pixels_of(picture)).collect();
            encoded.extend(self.pass.encode(&pixels)?);
            done += work(&*self.pass, batch);
            advanced(done, total);
            rest = after;
        }
        Ok(encoded)
    }

    /// What the text model reads of an encoded picture: each row's embedding, rows that are added after the first layers, positions
    /// by row and column in models whose rotation has sections, and in which layers the rows attend to each other.
    fn rows(&self, encoded: EncodedPicture, hash: ContentHash) -> PictureRows {
        let EncodedPicture { rows, deepstack, nx, ny } = encoded;
        let n_rows = rows.len() / self.n_embd;
        let columns_of_grid = nx.max(1) as u32;
        let position = |i: u32| Position([0, i / columns_of_grid, i % columns_of_grid]);
        let content = SpanContent {
            hash,
            rows,
            deepstack,
            positions: if self.has_sections { (0..n_rows as u32).map(position).collect() } else { Vec::new() },
            bidirectional_in: self.bidirectional_in.clone(),
        };
        PictureRows { content: Arc::new(content), n_rows, nx, ny }
    }
}

/// A picture as an encoder reads it.
pub(crate) fn pixels_of(picture: &Picture) -> Pixels<'_> {
    Pixels { rgb: picture.rgb(), width: picture.width(), height: picture.height() }
}

/// The layers of a text model in which the rows of a picture attend to each other; empty: none.
fn bidirectional_in(attention: PictureAttention, text: &ModelSpec) -> Vec<bool> {
    match attention {
        PictureAttention::Causal => Vec::new(),
        PictureAttention::Bidirectional => vec![true; text.n_layer()],
        PictureAttention::BidirectionalInWindows => {
            let layers = text.layers.iter();
            layers.map(|layer| layer.mixer.attention().is_some_and(|attention| has_window(attention.mask))).collect()
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

/// The place of a picture in a text for [`PromptBuilder::text_with_pictures`].
pub const PICTURE_PLACE: &str = "<image>";

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

    /// Appends a text with pictures. A picture stands where the text has [`PICTURE_PLACE`]; those without a place stand before
    /// the text. The names of control tokens in the text become these tokens if `parse_special` is set.
    ///
    /// # Errors
    ///
    /// [`Error::PicturePlaces`]: the text has more places than there are pictures.
    pub fn text_with_pictures(
        &mut self,
        text: &str,
        parse_special: bool,
        pictures: &[&PicturePrompt],
    ) -> Result<(), Error> {
        let (n_places, n_pictures) = (text.matches(PICTURE_PLACE).count(), pictures.len());
        let Some(n_before) = n_pictures.checked_sub(n_places) else {
            return Err(Error::PicturePlaces { n_places, n_pictures });
        };
        let (before, within) = pictures.split_at(n_before);
        for picture in before {
            self.picture(picture);
        }
        let options = EncodeOptions { add_special: false, parse_special };
        let mut within = within.iter();
        for text in text.split(PICTURE_PLACE) {
            self.ids.extend(self.tokenizer.encode(text, options));
            if let Some(picture) = within.next() {
                self.picture(picture);
            }
        }
        Ok(())
    }

    /// Appends a picture.
    pub fn picture(&mut self, picture: &PicturePrompt) {
        for part in &picture.parts {
            match part {
                PicturePart::Text(text) => self.text(text, &[]),
                PicturePart::Token(id) => self.ids.push(*id),
                PicturePart::Rows(rows) => {
                    let start = self.ids.len();
                    self.ids.resize(start + rows.n_rows, 0);
                    self.spans.push(PromptSpan { inputs: start..self.ids.len(), content: Arc::clone(&rows.content) });
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
