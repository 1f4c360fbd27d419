//! `/slots/{id_slot}`: saves the sequence of a slot to a file, restores one from a file, or erases it.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use metal_attention::scheduler::{Client, SlotError};
use metal_attention::{ForwardError, SessionError, SessionFile, SnapshotError};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::error::ErrorBody;
use crate::http::address::{self, Query};
use crate::http::body::{FromJson, Object, OptionalJson};
use crate::http::models::ModelLease;
use crate::http::{ApiError, App, run_blocking, task_outcome};

/// Maximum bytes of a file's name.
const MAX_NAME: usize = 128;

/// An operation on a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SlotOperation {
    Save,
    Restore,
    Erase,
}

/// The query of a request.
#[derive(Debug, Deserialize)]
pub struct ActionQuery {
    /// The operation.
    action: Option<SlotOperation>,
    /// The model's name; `None`: the default one.
    model: Option<String>,
}

/// The file of an operation.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
#[schema(as = LlamaCppSlotFile)]
pub struct SlotFile {
    /// The file's name in the server's folder for slots: letters, digits, `.`, `_` and `-`, the first a letter or a
    /// digit.
    #[schema(min_length = 1, max_length = 128)]
    filename: Option<String>,
    /// The model's name, as in the query.
    model: Option<String>,
}

impl FromJson for SlotFile {
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError> {
        object.parse()
    }
}

/// The result of an operation.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = LlamaCppSlotAction)]
pub enum SlotAction {
    /// The sequence was saved.
    Saved {
        /// The slot.
        id_slot: usize,
        /// The file.
        filename: String,
        /// Tokens of the sequence.
        n_saved: usize,
        /// Bytes of the file.
        n_written: u64,
        /// The time of the operation.
        timings: SaveTimings,
    },
    /// A sequence was restored.
    Restored {
        /// The slot.
        id_slot: usize,
        /// The file.
        filename: String,
        /// Tokens of the sequence.
        n_restored: usize,
        /// Bytes of the file.
        n_read: u64,
        /// The time of the operation.
        timings: RestoreTimings,
    },
    /// The sequence was erased.
    Erased {
        /// The slot.
        id_slot: usize,
        /// Tokens of the sequence.
        n_erased: usize,
    },
}

/// The time to save a sequence.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LlamaCppSaveTimings)]
pub struct SaveTimings {
    /// In milliseconds.
    save_ms: f64,
}

/// The time to restore a sequence.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LlamaCppRestoreTimings)]
pub struct RestoreTimings {
    /// In milliseconds.
    restore_ms: f64,
}

/// Saves the sequence of a slot to a file, restores one from a file, or erases it. Slots have the numbers of `/slots`;
/// after the running sequences, they hold finished ones that are still in the KV cache, the most recent first.
#[utoipa::path(post, path = "/slots/{id_slot}", tag = "llama.cpp", params(
    ("id_slot" = usize, Path, description = "The slot"),
    ("action" = String, Query, description = "`save`, `restore` or `erase`"),
    ("model" = Option<String>, Query, description = "The model's name")),
    request_body(content = Option<SlotFile>, description = "The file; nothing to erase a slot"),
    responses(
        (status = 200, description = "It is done", body = SlotAction),
        (status = 400, description = "There is no such slot, it is empty, or the file is wrong", body = ErrorBody),
        (status = 403, description = "Clients may not change models", body = ErrorBody),
        (status = 404, description = "There is no such file", body = ErrorBody),
        (status = 501, description = "The server has no folder for slots", body = ErrorBody),
        (status = 503, description = "Texts that run, or memory, leave no room, or one runs in the slot", body = ErrorBody)))]
pub async fn slot_action(
    State(app): State<App>,
    client: Client,
    address::Path(id_slot): address::Path<String>,
    Query(query): Query<ActionQuery>,
    OptionalJson(file): OptionalJson<SlotFile>,
) -> Result<axum::Json<SlotAction>, ApiError> {
    let folder = app.options.slot_save_path.clone().ok_or_else(|| {
        ApiError::not_supported("this server saves no slots: start it with --slot-save-path and a folder for them")
    })?;
    app.check_may_manage()?;
    let id_slot: usize = id_slot.parse().map_err(|_| {
        let message = format!("the slot {id_slot:?} is no number");
        ApiError::field("id_slot", message)
    })?;
    let Some(action) = query.action else {
        return Err(ApiError::field("action", "action is missing: it must be save, restore or erase"));
    };
    let model = app.lease(query.model.as_deref().or(file.model.as_deref())).await?;
    let done = match action {
        SlotOperation::Save => save(&app, &model, id_slot, &folder, file_name(&file)?).await?,
        SlotOperation::Restore => restore(&app, &model, id_slot, client, &folder, file_name(&file)?).await?,
        SlotOperation::Erase => SlotAction::Erased { id_slot, n_erased: model.scheduler.erase_slot(id_slot).await? },
    };
    Ok(axum::Json(done))
}

/// Copies the sequence of a slot to memory and writes it to a file.
async fn save(
    app: &App,
    model: &ModelLease,
    id_slot: usize,
    folder: &Path,
    filename: &str,
) -> Result<SlotAction, ApiError> {
    let start = Instant::now();
    let (path, lease, owned) = (folder.join(filename), model.clone(), app.clone());
    let save = async move {
        let sequence = lease.scheduler.save_slot(id_slot).await?;
        let write = move |_: &App| {
            check_file(&path)?;
            let n_written = SessionFile::write_copy(&path, lease.model(), &sequence)?;
            Ok((sequence.ids().len(), n_written))
        };
        run_blocking(&owned, write).await
    };
    let (n_saved, n_written) = one_at_a_time(app, save).await?;
    let timings = SaveTimings { save_ms: milliseconds(start) };
    Ok(SlotAction::Saved { id_slot, filename: filename.to_owned(), n_saved, n_written, timings })
}

/// Reads a sequence from a file and gives it to a slot.
async fn restore(
    app: &App,
    model: &ModelLease,
    id_slot: usize,
    client: Client,
    folder: &Path,
    filename: &str,
) -> Result<SlotAction, ApiError> {
    let start = Instant::now();
    let (path, lease, owned) = (folder.join(filename), model.clone(), app.clone());
    let restore = async move {
        let model = lease.clone();
        let read = move |_: &App| {
            check_file(&path)?;
            let file = SessionFile::open(&path)?;
            let n_read = file.bytes();
            Ok((file.read(model.model(), model.scheduler.cache_capacity())?, n_read))
        };
        let (sequence, n_read) = run_blocking(&owned, read).await?;
        let n_restored = sequence.ids().len();
        lease.scheduler.restore_slot(id_slot, client, sequence).await?;
        Ok((n_restored, n_read))
    };
    let (n_restored, n_read) = one_at_a_time(app, restore).await?;
    let timings = RestoreTimings { restore_ms: milliseconds(start) };
    Ok(SlotAction::Restored { id_slot, filename: filename.to_owned(), n_restored, n_read, timings })
}

/// Runs `work`, which has a copy of a sequence in memory that may be as large as the KV cache: one at a time, and to
/// its end even if the client disconnects.
async fn one_at_a_time<T: Send + 'static>(
    app: &App,
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    let guard = Arc::clone(&app.slot_copy).lock_owned().await;
    let work = async move {
        let done = work.await;
        drop(guard);
        done
    };
    task_outcome(tokio::spawn(work).await)
}

fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// Returns the file's name. It cannot lead out of the folder.
fn file_name(file: &SlotFile) -> Result<&str, ApiError> {
    let wrong = |message: String| Err(ApiError::field("filename", message));
    let Some(name) = file.filename.as_deref() else {
        return wrong("filename is missing: name a file in the server's folder for slots".into());
    };
    let is_plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if is_plain && name.len() <= MAX_NAME && name.starts_with(|first: char| first.is_ascii_alphanumeric()) {
        return Ok(name);
    }
    wrong(format!(
        "filename must be the name of a file alone: up to {MAX_NAME} letters, digits, '.', '_' and '-', of which the first is a \
         letter or a digit"
    ))
}

/// Fails where `path` exists and is no regular file: a link may lead out of the folder, and a pipe has no end.
fn check_file(path: &Path) -> Result<(), ApiError> {
    match path.symlink_metadata() {
        Ok(metadata) if !metadata.is_file() => {
            Err(ApiError::field("filename", "filename names something that is no file"))
        }
        Ok(_) | Err(_) => Ok(()),
    }
}

impl From<SlotError> for ApiError {
    fn from(error: SlotError) -> Self {
        let message = error.to_string();
        match error {
            SlotError::NoSuchSlot { .. } | SlotError::Empty { .. } => Self::field("id_slot", message),
            SlotError::Busy { .. } => Self::unavailable("slot_busy", message),
            SlotError::NoRoom { .. } => Self::unavailable("no_room", message),
            SlotError::Snapshot(SnapshotError::OtherLayout { .. }) => Self::field("filename", message),
            SlotError::Snapshot(SnapshotError::Forward(ForwardError::OutOfMemory { .. })) => {
                Self::unavailable("no_room", message)
            }
            SlotError::Snapshot(_) => Self::internal(message),
            SlotError::Submit(error) => error.into(),
        }
    }
}

impl From<SessionError> for ApiError {
    fn from(error: SessionError) -> Self {
        let message = error.to_string();
        match error {
            SessionError::Read(source) if source.kind() == std::io::ErrorKind::NotFound => {
                Self::not_found("slot_file_not_found", "there is no file of this name in the server's folder for slots")
                    .with_param("filename")
            }
            SessionError::Read(_) | SessionError::Write(_) => Self::internal(message),
            SessionError::Snapshot(SnapshotError::Forward(_)) => Self::unavailable("no_room", message),
            // The file is no session, or one of another model or KV cache layout.
            _ => Self::field("filename", message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lack_of_memory_is_no_error_of_the_client() {
        let no_memory = || SnapshotError::Forward(ForwardError::OutOfMemory { what: "a copy", bytes: 1 << 40 });
        assert_eq!(ApiError::from(SessionError::from(no_memory())).status(), 503);
        assert_eq!(ApiError::from(SlotError::from(no_memory())).status(), 503);
        let damaged = SnapshotError::Damaged { why: "it lacks pages" };
        assert_eq!(ApiError::from(SessionError::from(damaged)).status(), 400);
    }

    #[test]
    fn file_names_cannot_lead_out_of_the_folder() {
        let check = |name: &str| {
            let file = SlotFile { filename: Some(name.into()), model: None };
            file_name(&file).map(str::to_owned).map_err(|error| error.param().map(str::to_owned))
        };
        for good in ["a", "chat-1.bin", "0_a..b", &"x".repeat(MAX_NAME)] {
            assert_eq!(check(good), Ok(good.to_owned()));
        }
        for wrong in
            ["", ".", "..", ".a", "-a", "a/b", "/a", "..\\a", "a\\b", "C:a", "a\0", "a\n", " a", "é", &"x".repeat(129)]
        {
            assert_eq!(check(wrong), Err(Some("filename".into())), "{wrong:?}");
        }
        assert!(file_name(&SlotFile::default()).is_err());
    }
}
