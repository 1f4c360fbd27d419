//! Where the bytes of a picture are: in the request, or at an address.

use std::borrow::Cow;
use std::sync::Arc;

use base64::Engine;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use metal_attention_chat::{MessagePicture, PictureSource};
use sha2::{Digest, Sha256};

use super::PictureOptions;
use super::cache::FileKey;
use super::fetch::{self, PictureUrl};
use crate::http::ApiError;

/// Base64 with or without padding: clients send both.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// A picture's source, checked.
pub enum Source {
    /// Base64 in the request.
    Sent(SentBase64),
    /// An address of an allowed host.
    At(PictureUrl),
}

/// Base64 in the request: the text from a byte on.
#[derive(Clone)]
pub struct SentBase64 {
    text: Arc<str>,
    start: usize,
}

/// The bytes of a picture's file.
pub enum SourceBytes {
    /// In Base64.
    Base64(SentBase64),
    /// As they were fetched.
    Fetched(Vec<u8>),
}

impl Source {
    /// Checks a picture's source. Nothing is fetched or decoded.
    pub fn new(picture: &MessagePicture, options: &PictureOptions) -> Result<Self, ApiError> {
        match &picture.source {
            PictureSource::Base64(text) => {
                // Some clients send the whole address of a picture where only its Base64 is expected.
                let start = if text.starts_with("data:") { data_start(text)? } else { 0 };
                Ok(Self::Sent(SentBase64 { text: Arc::clone(text), start }))
            }
            PictureSource::Url(url) if has_scheme(url, "data:") => {
                Ok(Self::Sent(SentBase64 { text: Arc::clone(url), start: data_start(url)? }))
            }
            PictureSource::Url(url) => PictureUrl::new(url, &options.hosts).map(Self::At),
        }
    }

    /// The bytes, fetched if they are at an address. `permit` is held by the thread that fetches, and returned.
    pub async fn fetched<P: Send + 'static>(self, permit: P) -> Result<(SourceBytes, P), ApiError> {
        match self {
            Self::Sent(text) => Ok((SourceBytes::Base64(text), permit)),
            Self::At(url) => {
                fetch::fetch(url, permit).await.map(|(bytes, permit)| (SourceBytes::Fetched(bytes), permit))
            }
        }
    }
}

impl SourceBytes {
    /// The key of the file in the cache.
    pub fn key(&self, low_detail: bool) -> FileKey {
        let bytes = match self {
            Self::Base64(SentBase64 { text, start }) => text[*start..].as_bytes(),
            Self::Fetched(bytes) => bytes,
        };
        FileKey(Sha256::new_with_prefix([u8::from(low_detail)]).chain_update(bytes).finalize().into())
    }

    /// The file.
    pub fn decoded(&self) -> Result<Cow<'_, [u8]>, ApiError> {
        match self {
            Self::Fetched(bytes) => Ok(Cow::Borrowed(bytes)),
            Self::Base64(SentBase64 { text, start }) => {
                let text = text[*start..].as_bytes();
                // Line breaks are allowed between the letters.
                let has_space = text.iter().any(u8::is_ascii_whitespace);
                let compact = || text.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect::<Vec<_>>();
                let decoded = if has_space { BASE64.decode(compact()) } else { BASE64.decode(text) };
                decoded.map(Cow::Owned).map_err(|error| wrong(format!("its Base64 is damaged: {error}")))
            }
        }
    }
}

/// The error of a picture itself.
fn wrong(message: impl Into<String>) -> ApiError {
    ApiError::field("image", message)
}

/// Whether an address begins with `scheme`, in any case.
fn has_scheme(url: &str, scheme: &str) -> bool {
    url.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme))
}

/// Where the Base64 of an address `data:image/png;base64,...` (RFC 2397) begins. The media type is not read: the file itself says
/// what it is.
fn data_start(url: &str) -> Result<usize, ApiError> {
    let head = url.find(',').map(|comma| &url[..comma]);
    match head {
        Some(head) if head.to_ascii_lowercase().ends_with(";base64") => Ok(head.len() + 1),
        Some(_) | None => Err(wrong("a data: address must have its bytes in Base64: data:image/png;base64,...")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(source: PictureSource) -> Result<Vec<u8>, String> {
        let picture = MessagePicture { source, low_detail: false };
        let source = Source::new(&picture, &PictureOptions::default()).map_err(|error| error.message().to_owned())?;
        let Source::Sent(text) = source else { panic!("an address") };
        SourceBytes::Base64(text).decoded().map(Cow::into_owned).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn base64_is_read_in_all_its_forms() {
        let url = |url: &str| decoded(PictureSource::Url(url.into()));
        for good in ["data:image/png;base64,QUI=", "DATA:;BASE64,QUI", "data:image/png;name=a;base64,QU\nI=\r\n"] {
            assert_eq!(url(good).as_deref(), Ok(&b"AB"[..]), "{good}");
        }
        for base64 in ["QUI=", "QUI", "data:image/png;base64,QUI="] {
            assert_eq!(decoded(PictureSource::Base64(base64.into())).as_deref(), Ok(&b"AB"[..]));
        }
        for wrong in
            ["data:image/png;base64,Q", "data:image/png;base64,Q?==", "data:image/png,abc", "data:", "data:;base64"]
        {
            assert!(url(wrong).is_err(), "{wrong}");
        }
        assert_eq!(url("data:;base64,").as_deref(), Ok(&b""[..]));
    }

    #[test]
    fn the_key_depends_on_the_detail() {
        let key = |low| SourceBytes::Fetched(vec![1, 2]).key(low);
        assert_eq!(key(true), key(true));
        assert_ne!(key(true), key(false));
    }
}
