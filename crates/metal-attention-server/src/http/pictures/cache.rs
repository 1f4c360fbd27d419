//! The rows of the pictures that were encoded last.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use metal_attention::PicturePrompt;

/// Files of a picture that are known: the same pixels may come in any number of files.
const MAX_FILES: usize = 8;

/// SHA-256 of a picture's file, or of its Base64 as it was sent, and of the detail that was wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileKey(pub [u8; 32]);

/// SHA-256 of a picture's pixels ([`DividedPicture::digest`](metal_attention::DividedPicture::digest)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PixelKey(pub [u8; 32]);

/// Encoded pictures, by their files and by their pixels: a file that is known need not be decoded, and files of the same pixels
/// share rows. The least recently used pictures are removed first.
pub struct PictureCache {
    max_bytes: usize,
    bytes: usize,
    /// Counts uses.
    clock: u64,
    by_pixels: HashMap<PixelKey, CachedPicture>,
    /// The pixels of files, up to [`MAX_FILES`] of each picture.
    by_file: HashMap<FileKey, PixelKey>,
}

/// A picture in the cache.
struct CachedPicture {
    prompt: Arc<PicturePrompt>,
    /// Its last files.
    files: VecDeque<FileKey>,
    /// The clock at its last use.
    used: u64,
}

impl PictureCache {
    /// An empty cache for rows of `max_bytes` in all.
    pub fn new(max_bytes: usize) -> Self {
        Self { max_bytes, bytes: 0, clock: 0, by_pixels: HashMap::new(), by_file: HashMap::new() }
    }

    /// The rows of a file's picture.
    pub fn of_file(&mut self, file: &FileKey) -> Option<Arc<PicturePrompt>> {
        let pixels = *self.by_file.get(file)?;
        self.of_pixels(&pixels)
    }

    /// The rows of a picture with these pixels.
    pub fn of_pixels(&mut self, pixels: &PixelKey) -> Option<Arc<PicturePrompt>> {
        self.clock += 1;
        let picture = self.by_pixels.get_mut(pixels)?;
        picture.used = self.clock;
        Some(Arc::clone(&picture.prompt))
    }

    /// Adds the rows of a picture, and removes others where there are too many bytes. Rows that exceed the cache alone are not
    /// kept.
    pub fn insert(&mut self, file: FileKey, pixels: PixelKey, prompt: &Arc<PicturePrompt>) {
        if prompt.n_bytes() > self.max_bytes {
            return;
        }
        self.clock += 1;
        let picture = self.by_pixels.entry(pixels).or_insert_with(|| {
            self.bytes += prompt.n_bytes();
            CachedPicture { prompt: Arc::clone(prompt), files: VecDeque::new(), used: 0 }
        });
        picture.used = self.clock;
        if self.by_file.insert(file, pixels).is_none() {
            picture.files.push_back(file);
        }
        if picture.files.len() > MAX_FILES
            && let Some(oldest) = picture.files.pop_front()
        {
            self.by_file.remove(&oldest);
        }
        while self.bytes > self.max_bytes {
            let oldest = self.by_pixels.iter().min_by_key(|(_, picture)| picture.used).map(|(key, _)| *key);
            let Some(removed) = oldest.and_then(|oldest| self.by_pixels.remove_entry(&oldest)) else { break };
            let (_, picture) = removed;
            self.bytes -= picture.prompt.n_bytes();
            for file in &picture.files {
                self.by_file.remove(file);
            }
        }
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use metal_attention::{ContentHash, PicturePart, PictureRows, SpanContent};

    use super::*;

    /// A picture whose rows have `n` numbers.
    fn rows(n: usize) -> Arc<PicturePrompt> {
        let content = SpanContent {
            hash: ContentHash([0; 32]),
            rows: vec![0.0; n],
            deepstack: Vec::new(),
            positions: Vec::new(),
            bidirectional_in: Vec::new(),
        };
        let rows = PictureRows { content: Arc::new(content), n_rows: 1, nx: 1, ny: 1 };
        Arc::new(PicturePrompt { parts: vec![PicturePart::Rows(rows)] })
    }

    #[test]
    fn the_least_recently_used_picture_is_removed() {
        let mut cache = PictureCache::new(4 * 30);
        let (file, pixels) = (|n| FileKey([n; 32]), |n| PixelKey([n; 32]));
        for n in 1..=3 {
            cache.insert(file(n), pixels(n), &rows(10));
        }
        // Another file of the same pixels.
        cache.insert(file(11), pixels(1), &rows(10));
        assert_eq!(cache.bytes(), 120);
        assert!(cache.of_file(&file(2)).is_some());
        cache.insert(file(4), pixels(4), &rows(10));
        assert_eq!(cache.bytes(), 120);
        let present = |cache: &mut PictureCache, n| cache.of_file(&file(n)).is_some();
        assert_eq!([1, 11, 2, 3, 4].map(|n| present(&mut cache, n)), [true, true, true, false, true]);
        assert!(cache.of_pixels(&pixels(3)).is_none());
        // Of many files of one picture the last ones are known.
        for n in 20..40 {
            cache.insert(file(n), pixels(4), &rows(10));
        }
        assert_eq!((present(&mut cache, 31), present(&mut cache, 32), cache.by_file.len()), (false, true, 11));
        cache.insert(file(5), pixels(5), &rows(31));
        assert!(!present(&mut cache, 5));
        cache.insert(file(6), pixels(6), &rows(30));
        assert_eq!([1, 11, 2, 4, 6].map(|n| present(&mut cache, n)), [false, false, false, false, true]);
        assert_eq!((cache.bytes(), cache.by_file.len()), (120, 1));
    }
}
