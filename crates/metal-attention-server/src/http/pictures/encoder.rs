//! The picture encoder of a model: a thread that encodes the pictures of all clients, several at a time.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use metal_attention::tokenizer::Tokenizer;
use metal_attention::{DividedPicture, Error, PictureDivider, PictureEncoder, PicturePrompt};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::cache::{FileKey, PictureCache, PixelKey};
use crate::http::ApiError;

/// Maximum pictures that are encoded together.
const MAX_BATCH: usize = 16;

/// The picture encoder of a model, and the rows of the last pictures. When it is dropped, its thread ends and the encoder's memory
/// is free.
pub struct PictureService {
    /// Makes pictures ready for the encoder.
    divider: PictureDivider,
    /// Pictures for the encoder; `None` while it is dropped.
    requests: Option<Sender<EncodeRequest>>,
    /// The thread; `None` while it is dropped.
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

/// What the thread shares with requests.
struct Shared {
    cache: Mutex<PictureCache>,
    counters: Counters,
}

/// Counters for `/metrics`.
#[derive(Default)]
struct Counters {
    encoded: AtomicU64,
    cached: AtomicU64,
    batches: AtomicU64,
    microseconds: AtomicU64,
}

/// The work of a picture encoder so far.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PictureMetrics {
    /// Pictures that were encoded.
    pub encoded: u64,
    /// Pictures whose rows were known.
    pub cached: u64,
    /// Runs of the encoder, each over one or several pictures.
    pub batches: u64,
    /// Time of these runs.
    pub seconds: f64,
    /// Bytes of the rows that are kept.
    pub cache_bytes: usize,
}

/// A picture for the encoder.
pub struct NewPicture {
    pub picture: DividedPicture,
    /// The key of its file.
    pub file: FileKey,
    /// Held until it is encoded.
    pub permit: Option<OwnedSemaphorePermit>,
}

/// A picture that waits for the encoder.
struct EncodeRequest {
    new: NewPicture,
    answer: oneshot::Sender<Result<Arc<PicturePrompt>, Arc<Error>>>,
}

impl PictureService {
    /// Starts the thread. `cache_bytes`: the rows of the last pictures that are kept.
    ///
    /// # Errors
    ///
    /// A thread that the system refuses.
    pub fn start(encoder: PictureEncoder, tokenizer: Arc<Tokenizer>, cache_bytes: usize) -> io::Result<Self> {
        let divider = encoder.divider();
        let cache = Mutex::new(PictureCache::new(cache_bytes));
        let shared = Arc::new(Shared { cache, counters: Counters::default() });
        let (requests, received) = mpsc::channel();
        let mut thread = EncoderThread { encoder, tokenizer, shared: Arc::clone(&shared) };
        let run = move || thread.run(&received);
        let thread = std::thread::Builder::new().name("pictures".into()).spawn(run)?;
        Ok(Self { divider, requests: Some(requests), thread: Some(thread), shared })
    }

    /// What makes pictures ready for [`encode`](Self::encode).
    pub fn divider(&self) -> &PictureDivider {
        &self.divider
    }

    /// The rows of the picture in a file, if they are known.
    pub fn of_file(&self, file: &FileKey) -> Option<Arc<PicturePrompt>> {
        let known = self.shared.cache().of_file(file)?;
        self.shared.counters.cached.fetch_add(1, Ordering::Relaxed);
        Some(known)
    }

    /// Encodes a picture, together with others that wait. Dropping the future leaves the picture out.
    pub async fn encode(&self, new: NewPicture) -> Result<Arc<PicturePrompt>, ApiError> {
        let failed = || ApiError::internal("the picture encoder met a defect and has ended: load the model again");
        let (answer, rows) = oneshot::channel();
        let requests = self.requests.as_ref().ok_or_else(failed)?;
        requests.send(EncodeRequest { new, answer }).map_err(|_| failed())?;
        match rows.await {
            Ok(Ok(prompt)) => Ok(prompt),
            Ok(Err(error)) => Err(ApiError::internal(format!("the picture could not be encoded: {error}"))),
            Err(_) => Err(failed()),
        }
    }

    /// The work so far.
    pub fn metrics(&self) -> PictureMetrics {
        let Counters { encoded, cached, batches, microseconds } = &self.shared.counters;
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PictureMetrics {
            encoded: value(encoded),
            cached: value(cached),
            batches: value(batches),
            seconds: value(microseconds) as f64 / 1e6,
            cache_bytes: self.shared.cache().bytes(),
        }
    }
}

impl Drop for PictureService {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported when it occurred.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn cache(&self) -> MutexGuard<'_, PictureCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread's state.
struct EncoderThread {
    encoder: PictureEncoder,
    tokenizer: Arc<Tokenizer>,
    shared: Arc<Shared>,
}

impl EncoderThread {
    /// Encodes pictures until there are no more senders.
    fn run(&mut self, received: &Receiver<EncodeRequest>) {
        while let Ok(first) = received.recv() {
            let mut n_pixels = first.new.picture.n_pixels();
            let mut batch = vec![first];
            while batch.len() < MAX_BATCH
                && n_pixels < PictureEncoder::BATCH_PIXELS
                && let Ok(next) = received.try_recv()
            {
                n_pixels += next.new.picture.n_pixels();
                batch.push(next);
            }
            self.encode(batch);
        }
    }

    /// Encodes the pictures of a batch that are new, and answers all.
    fn encode(&mut self, mut batch: Vec<EncodeRequest>) {
        // Clients may have gone.
        batch.retain(|request| !request.answer.is_closed());
        let counters = &self.shared.counters;
        let mut pictures = Vec::new();
        let mut waiting: HashMap<PixelKey, Vec<(FileKey, _, _)>> = HashMap::new();
        for EncodeRequest { new: NewPicture { picture, file, permit }, answer } in batch {
            let pixels = PixelKey(picture.digest());
            // Another request may have had the same picture meanwhile.
            let known = self.shared.cache().of_pixels(&pixels);
            if let Some(known) = known {
                counters.cached.fetch_add(1, Ordering::Relaxed);
                self.shared.cache().insert(file, pixels, &known);
                let _ = answer.send(Ok(known));
                continue;
            }
            let same = waiting.entry(pixels).or_default();
            if same.is_empty() {
                pictures.push(picture);
            } else {
                counters.cached.fetch_add(1, Ordering::Relaxed);
            }
            same.push((file, answer, permit));
        }
        if pictures.is_empty() {
            return;
        }
        let start = Instant::now();
        let mut encode = |pictures: &[DividedPicture]| self.encoder.encode(pictures, &self.tokenizer, |_, _| {});
        // A picture that is too large for the device must not fail others.
        let encoded: Vec<Result<PicturePrompt, Error>> = match encode(&pictures) {
            Ok(prompts) => prompts.into_iter().map(Ok).collect(),
            Err(error) if pictures.len() == 1 => vec![Err(error)],
            Err(_) => {
                let alone = |picture| Ok(encode(std::slice::from_ref(picture))?.remove(0));
                pictures.iter().map(alone).collect()
            }
        };
        counters.batches.fetch_add(1, Ordering::Relaxed);
        counters.microseconds.fetch_add(start.elapsed().as_micros() as u64, Ordering::Relaxed);
        for (picture, prompt) in pictures.iter().zip(encoded) {
            let pixels = PixelKey(picture.digest());
            let prompt = prompt.map(Arc::new).map_err(Arc::new);
            counters.encoded.fetch_add(u64::from(prompt.is_ok()), Ordering::Relaxed);
            for (file, answer, _permit) in waiting.remove(&pixels).into_iter().flatten() {
                if let Ok(prompt) = &prompt {
                    self.shared.cache().insert(file, pixels, prompt);
                }
                // The client may have gone.
                let _ = answer.send(prompt.clone());
            }
        }
    }
}
