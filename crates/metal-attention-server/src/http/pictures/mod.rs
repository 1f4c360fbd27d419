//! Pictures of requests: from what a client sent to rows of a prompt.
//!
//! A picture passes `source.rs` (the bytes of its file), a blocking thread (pixels, resized and divided), and `encoder.rs`, a
//! thread of each model that encodes the pictures of all clients together and keeps the rows of the last ones. All of that precedes
//! the submission of the request, which finds the rows ready; streams of others go on meanwhile.

mod cache;
mod encoder;
mod fetch;
mod source;

use std::sync::Arc;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use metal_attention::PicturePrompt;
use metal_attention::picture_files::{Filter, Limits, Picture};
use metal_attention_chat::{Message, MessagePicture, take_pictures};

use encoder::NewPicture;
pub use encoder::{PictureMetrics, PictureService};
pub use fetch::HostName;
use source::{Source, SourceBytes};

use super::models::ModelLease;
use super::peer::Peer;
use super::work::WorkSize;
use super::{ApiError, App, within_timeout};

/// Pictures of one request that are decoded or wait for the encoder at a time.
const AT_ONCE: usize = 4;
/// Pictures of all requests that are decoded or wait for the encoder at a time: each takes the memory of its pixels.
pub const ALL_AT_ONCE: usize = 16;
/// The longer side of a picture of which a copy with few pixels is enough (`"detail": "low"`).
const LOW_DETAIL_SIDE: usize = 512;

/// The limits of pictures.
#[derive(Debug, Clone)]
pub struct PictureOptions {
    /// Maximum pictures of a request.
    pub max_count: usize,
    /// Maximum bytes of all pictures in a request's body, as they are sent.
    pub max_bytes: usize,
    /// Hosts from which pictures are fetched. Pictures at other addresses are refused.
    pub hosts: Vec<HostName>,
}

impl Default for PictureOptions {
    fn default() -> Self {
        Self { max_count: 100, max_bytes: 128 << 20, hosts: Vec::new() }
    }
}

/// A conversation with pictures.
#[derive(Debug, Clone, Default)]
pub struct Conversation {
    /// The messages, the first one first. In their texts markers with numbers stand for pictures.
    pub messages: Vec<Message>,
    /// The pictures by their numbers.
    pub pictures: Vec<MessagePicture>,
}

impl Conversation {
    /// A conversation of messages that have their pictures.
    pub fn new(mut messages: Vec<Message>) -> Self {
        let pictures = take_pictures(&mut messages);
        Self { messages, pictures }
    }

    /// Bytes of the pictures as they were sent.
    pub fn picture_bytes(&self) -> usize {
        self.pictures.iter().map(MessagePicture::bytes_sent).sum()
    }
}

/// The encoded pictures of a request, by their numbers.
pub type EncodedPictures = Vec<Arc<PicturePrompt>>;

/// Encodes the pictures of a request, up to [`AT_ONCE`] at a time. `field`: the request's field that has the conversation, for
/// errors.
///
/// # Errors
///
/// A model that sees no pictures, too many pictures, one that cannot be read, or the request timeout.
pub async fn encode(
    app: &App,
    model: &ModelLease,
    peer: Peer,
    field: &str,
    pictures: &[MessagePicture],
) -> Result<EncodedPictures, ApiError> {
    if pictures.is_empty() {
        return Ok(Vec::new());
    }
    let max = app.options.pictures.max_count;
    if pictures.len() > max {
        let message = format!("{field} has {} pictures; at most {max} are allowed (--max-images)", pictures.len());
        return Err(ApiError::field(field, message).with_code("too_many_images"));
    }
    model.picture_service()?;
    let n = pictures.len();
    let one = async |(i, picture): (usize, &MessagePicture)| {
        encode_one(app, model, peer, picture).await.map_err(|error| {
            if error.param().is_none() {
                return error;
            }
            let message = format!("{field}: picture {} of {n}: {}", i + 1, error.message());
            ApiError::field(field, message).with_code("invalid_image")
        })
    };
    let all = stream::iter(pictures.iter().enumerate().map(one)).buffered(AT_ONCE).try_collect();
    within_timeout(app, all).await
}

/// Encodes one picture, or takes its rows from the cache. An error of the picture itself has a field.
async fn encode_one(
    app: &App,
    model: &ModelLease,
    peer: Peer,
    picture: &MessagePicture,
) -> Result<Arc<PicturePrompt>, ApiError> {
    let source = Source::new(picture, &app.options.pictures)?;
    let low_detail = picture.low_detail;
    if let Source::Sent(sent) = &source {
        // A picture that is known waits for no other.
        let (lease, bytes) = (model.clone(), SourceBytes::Base64(sent.clone()));
        let look_up = move || Ok(lease.picture_service()?.of_file(&bytes.key(low_detail)));
        if let Some(known) = app.work.run(peer, WorkSize::of_picture(), look_up).await? {
            return Ok(known);
        }
    }
    // The permit goes with the picture, since work on blocking threads and in the encoder's queue outlives a client that leaves.
    // The semaphore is never closed.
    let permit = Arc::clone(&app.pictures_at_once).acquire_owned().await.ok();
    let (bytes, permit) = source.fetched(permit).await?;
    let lease = model.clone();
    let divide = move || {
        let service = lease.picture_service()?;
        let key = bytes.key(low_detail);
        if let Some(known) = service.of_file(&key) {
            return Ok(Divided::Known(known));
        }
        let wrong = |error: &dyn std::fmt::Display| ApiError::field("image", error.to_string());
        let file = bytes.decoded()?;
        let mut pixels = Picture::decode(&file, &Limits::default()).map_err(|error| wrong(&error))?;
        drop(file);
        if low_detail {
            pixels = reduced(pixels).map_err(|error| wrong(&error))?;
        }
        let picture = service.divider().divide(&pixels).map_err(|error| wrong(&error))?;
        Ok(Divided::New(NewPicture { picture, file: key, permit }))
    };
    match app.work.run(peer, WorkSize::of_picture(), divide).await? {
        Divided::Known(prompt) => Ok(prompt),
        Divided::New(picture) => model.picture_service()?.encode(picture).await,
    }
}

/// A picture that is encoded already, or ready for the encoder.
enum Divided {
    Known(Arc<PicturePrompt>),
    New(NewPicture),
}

/// A picture whose longer side has at most [`LOW_DETAIL_SIDE`] pixels.
fn reduced(picture: Picture) -> metal_attention::picture_files::Result<Picture> {
    let (width, height) = (picture.width(), picture.height());
    let longer = width.max(height);
    if longer <= LOW_DETAIL_SIDE {
        return Ok(picture);
    }
    let side = |side: usize| (side * LOW_DETAIL_SIDE).div_ceil(longer).max(1);
    picture.resized(side(width), side(height), Filter::Bicubic)
}
