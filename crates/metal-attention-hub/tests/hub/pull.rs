//! Downloads: layout of the cache, access tokens, split models, resuming, checksums, errors of the server, and hostile content
//! of the cache.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use metal_attention_hub::{CachedModel, DownloadObserver, Environment, Hub, HubError, HubToken, ModelName, Quiet};
use metal_attention_testing::hub_server::{COMMIT, HubServer, REPO, sha256};

const FILE: &str = "tiny-Q4_0.gguf";

/// A file's content, 300 000 bytes that depend on `seed`. Downloads do not read its format.
fn content(seed: u8) -> Vec<u8> {
    (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 ^ seed).collect()
}

struct Setup {
    server: HubServer,
    folder: tempfile::TempDir,
}

impl Setup {
    fn with(files: &[(&str, &[u8])]) -> Self {
        Self { server: HubServer::with(files), folder: tempfile::tempdir().unwrap() }
    }

    fn environment(&self) -> Environment {
        Environment {
            cache: self.folder.path().join("hub"),
            endpoint: self.server.url.clone(),
            token: None,
            offline: false,
        }
    }

    fn hub(&self) -> Hub {
        Hub::new(self.environment()).with_pause(Duration::from_millis(1))
    }

    fn pull(&self, which: &str) -> Result<CachedModel, HubError> {
        self.hub().pull(&name(which), &mut Quiet)
    }

    fn repo(&self) -> PathBuf {
        self.folder.path().join("hub/models--tester--tiny-GGUF")
    }

    fn partial(&self, bytes: &[u8]) -> PathBuf {
        self.repo().join(format!("blobs/{}.incomplete", sha256(bytes)))
    }

    /// The byte offsets of the requests for files since the last call. `to_storage`: those to the storage server, otherwise to
    /// the hub.
    fn starts(&self, to_storage: bool) -> Vec<usize> {
        let requests = self.server.requests().into_iter();
        let files = requests.filter(|r| r.to_storage == to_storage && r.method == "GET" && !r.path.starts_with("/api"));
        files.map(|r| r.range.map_or(0, |range| range["bytes=".len()..range.len() - 1].parse().unwrap())).collect()
    }
}

fn name(which: &str) -> ModelName {
    format!("hf:{REPO}{which}").parse().unwrap()
}

#[track_caller]
fn fails(result: Result<CachedModel, HubError>, parts: &[&str]) {
    let error = result.unwrap_err().to_string();
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
}

/// An observer that records the reports and stops the download at `stop_at` bytes.
#[derive(Default)]
struct Watch {
    stop_at: Option<u64>,
    done: u64,
    files: Vec<(String, u64, u64)>,
    notes: Vec<String>,
}

impl DownloadObserver for Watch {
    fn file(&mut self, name: &str, done: u64, bytes: u64) {
        self.files.push((name.to_owned(), done, bytes));
    }
    fn advance(&mut self, done: u64) {
        self.done = done;
    }
    fn note(&mut self, text: &str) {
        self.notes.push(text.to_owned());
    }
    fn stop(&self) -> bool {
        self.stop_at.is_some_and(|at| self.done >= at)
    }
}

#[test]
fn a_file_is_stored_in_the_layout_of_the_hub_cache() {
    let bytes = content(0);
    let s = Setup::with(&[(FILE, &bytes), ("README.md", b"hello\n")]);
    let model = s.pull("").unwrap();
    let pointer = s.repo().join("snapshots").join(COMMIT).join(FILE);
    assert_eq!(model.files, std::slice::from_ref(&pointer));
    assert_eq!(model.name.to_string(), format!("hf:{REPO}:Q4_0"));
    assert_eq!((model.bytes, model.is_newest, model.complete), (300_000, true, true));
    assert_eq!(fs::read(&pointer).unwrap(), bytes);
    if cfg!(unix) {
        assert_eq!(fs::read_link(&pointer).unwrap(), Path::new("../../blobs").join(sha256(&bytes)));
    }
    assert_eq!(fs::read_to_string(s.repo().join("refs/main")).unwrap(), COMMIT);
    assert!(!s.partial(&bytes).exists());

    // A second pull requests the list of files only.
    s.server.requests();
    assert_eq!(s.pull(":q4_0").unwrap().files, [pointer]);
    let paths: Vec<_> = s.server.requests().into_iter().map(|r| r.path).collect();
    assert_eq!(paths, [format!("/api/models/{REPO}/revision/main?blobs=true")]);
}

#[test]
fn the_token_is_sent_to_the_hub_only() {
    let bytes = content(0);
    let s = Setup::with(&[(FILE, &bytes)]);
    s.server.change().redirects = true;
    s.server.change().refuses = Some((401, "RepoNotFound"));
    fails(s.pull(""), &[REPO, "HF_TOKEN", "private or gated"]);
    let with = |token: &str| Environment { token: HubToken::new(token, "HF_TOKEN").unwrap(), ..s.environment() };
    fails(Hub::new(with("hf_wrong")).pull(&name(""), &mut Quiet), &[REPO, "refuses the token"]);
    s.server.requests();
    let model = Hub::new(with("hf_secret")).pull(&name(""), &mut Quiet).unwrap();
    assert_eq!(fs::read(&model.files[0]).unwrap(), bytes);
    let seen: Vec<_> = s.server.requests().into_iter().map(|r| (r.to_storage, r.authorization.is_some())).collect();
    assert_eq!(seen, [(false, true), (false, true), (true, false)]);
}

#[test]
fn all_parts_of_a_split_model_are_downloaded() {
    let (one, two) = (content(1), content(2));
    let parts = ["q8/tiny-Q8_0-00001-of-00002.gguf", "q8/tiny-Q8_0-00002-of-00002.gguf"];
    let s = Setup::with(&[(parts[1], &two), (FILE, &content(0)), (parts[0], &one)]);
    for which in [":Q8_0", &format!(":{}", parts[1])] {
        let model = s.pull(which).unwrap();
        let files: Vec<_> = model.files.iter().map(|file| fs::read(file).unwrap()).collect();
        assert_eq!(files, [one.clone(), two.clone()]);
        assert_eq!(model.files[0], s.repo().join("snapshots").join(COMMIT).join(parts[0]));
    }
    s.server.change().files.remove(0);
    fails(s.pull(":Q8_0"), &["lacks parts", parts[0]]);
}

#[test]
fn a_broken_download_is_resumed_at_its_offset() {
    let bytes = content(0);
    for redirects in [false, true] {
        let s = Setup::with(&[(FILE, &bytes)]);
        s.server.change().redirects = redirects;
        s.server.change().cuts = VecDeque::from([100_000, 0, 50_000]);
        let mut watch = Watch::default();
        let model = s.hub().pull(&name(""), &mut watch).unwrap();
        assert_eq!(fs::read(&model.files[0]).unwrap(), bytes);
        assert_eq!(s.starts(redirects), [0, 100_000, 100_000, 150_000]);
        assert_eq!(watch.files, [(FILE.to_owned(), 0, 300_000)]);
        assert_eq!(watch.notes.len(), 3, "{:?}", watch.notes);
    }
}

#[test]
fn a_later_download_resumes_a_failed_one() {
    let bytes = content(0);
    let s = Setup::with(&[(FILE, &bytes)]);
    s.server.change().cuts = VecDeque::from([100_000, 0, 0, 0]);
    fails(s.pull(""), &["broke off", FILE, "0.1 MiB of 0.3 MiB", "same command"]);
    assert_eq!(s.starts(false), [0, 100_000, 100_000, 100_000]);
    assert_eq!(fs::metadata(s.partial(&bytes)).unwrap().len(), 100_000);
    assert_eq!(s.hub().unfinished().unwrap()[0].bytes, 100_000);
    assert!(s.hub().find(&name("")).unwrap().is_none());

    let mut watch = Watch { stop_at: Some(200_000), ..Watch::default() };
    let error = s.hub().pull(&name(""), &mut watch).unwrap_err();
    assert!(matches!(error, HubError::Interrupted { done: 200_000.., .. }), "{error}");
    let done = fs::metadata(s.partial(&bytes)).unwrap().len();
    assert_eq!(done, watch.done);

    let mut watch = Watch::default();
    let model = s.hub().pull(&name(""), &mut watch).unwrap();
    assert_eq!(fs::read(&model.files[0]).unwrap(), bytes);
    assert_eq!(s.starts(false), [100_000, done as usize]);
    assert_eq!(watch.files, [(FILE.to_owned(), done, 300_000)]);
    assert!(s.hub().unfinished().unwrap().is_empty());
}

#[test]
fn temporary_failures_are_retried_and_lasting_ones_reported() {
    let bytes = content(0);
    let s = Setup::with(&[(FILE, &bytes)]);
    s.server.change().redirects = true;
    // 403: the storage's address has expired; 503 and 429: the server is busy.
    s.server.change().failures = VecDeque::from([403, 503, 429]);
    assert!(s.pull("").is_ok());
    let other = content(1);
    s.server.change().files[0].1 = other;
    s.server.change().failures = VecDeque::from([500, 500, 500, 500]);
    fails(s.pull(""), &["broke off", "status 500"]);
    s.server.change().failures = VecDeque::from([410]);
    fails(s.pull(""), &["status 410"]);
}

#[test]
fn two_concurrent_pulls_download_once() {
    let bytes = content(0);
    let s = Setup::with(&[(FILE, &bytes)]);
    std::thread::scope(|scope| {
        let pulls = [(); 2].map(|()| scope.spawn(|| s.pull("").unwrap()));
        for pull in pulls {
            assert_eq!(fs::read(&pull.join().unwrap().files[0]).unwrap(), bytes);
        }
    });
    assert_eq!(s.starts(false), [0]);
}

#[test]
fn a_server_without_ranges_sends_the_whole_file_again() {
    let bytes = content(0);
    let s = Setup::with(&[(FILE, &bytes)]);
    s.server.change().ignores_range = true;
    s.server.change().cuts = VecDeque::from([100_000]);
    assert_eq!(fs::read(&s.pull("").unwrap().files[0]).unwrap(), bytes);
    assert_eq!(s.starts(false), [0, 100_000]);

    // A download without progress is aborted.
    s.server.change().files[0].1 = content(1);
    s.server.change().cuts = VecDeque::from([100_000; 8]);
    fails(s.pull(""), &["broke off"]);
    assert_eq!(s.starts(false).len(), 4);
}

#[test]
fn content_of_the_cache_is_not_trusted() {
    let bytes = content(0);
    // A partial file that is too long is discarded. One with wrong bytes fails the checksum.
    let s = Setup::with(&[(FILE, &bytes)]);
    fs::create_dir_all(s.repo().join("blobs")).unwrap();
    fs::write(s.partial(&bytes), vec![0; 300_001]).unwrap();
    assert_eq!(fs::read(&s.pull("").unwrap().files[0]).unwrap(), bytes);

    let s = Setup::with(&[(FILE, &bytes)]);
    fs::create_dir_all(s.repo().join("blobs")).unwrap();
    fs::write(s.partial(&bytes), vec![0; 300_000]).unwrap();
    fails(s.pull(""), &["checksum", &sha256(&bytes)]);
    assert!(s.starts(false).is_empty());
    assert!(s.pull("").is_ok());

    // A truncated blob is downloaded again.
    let blob = s.repo().join("blobs").join(sha256(&bytes));
    fs::write(&blob, &bytes[..1000]).unwrap();
    assert_eq!(fs::read(&s.pull("").unwrap().files[0]).unwrap(), bytes);
}

#[test]
fn a_wrong_checksum_removes_the_file_and_is_reported() {
    let bytes = content(0);
    let s = Setup::with(&[(FILE, &bytes)]);
    s.server.change().damages = true;
    fails(s.pull(""), &[FILE, "damaged", "removed", &sha256(&bytes)]);
    assert!(!s.partial(&bytes).exists());
    assert_eq!(fs::read_dir(s.repo().join("blobs")).unwrap().count(), 0);
    assert!(!s.repo().join("snapshots").exists() && !s.repo().join("refs").exists());
    s.server.change().damages = false;
    assert!(s.pull("").is_ok());
}

#[test]
fn small_files_have_the_checksum_of_git() {
    // The hub's id of a small file is git's SHA-1 of this content.
    let s = Setup::with(&[(FILE, b"hello\n")]);
    let model = s.pull("").unwrap();
    assert_eq!(fs::read(&model.files[0]).unwrap(), b"hello\n");
    s.server.change().files[0].1 = b"hallo\n".to_vec();
    fs::remove_dir_all(s.repo()).unwrap();
    fails(s.pull(""), &["damaged", "ce013625030ba8dba906f756967f9e9ca394464a"]);
}

#[test]
fn sizes_sent_by_the_server_are_checked() {
    let bytes = content(0);
    let s = Setup::with(&[(FILE, &bytes)]);
    s.server.change().content_length = Some(1 << 60);
    fails(s.pull(""), &["makes no sense", "300000 bytes"]);
    // A partial response that claims to be longer than the rest ends at the file's size.
    s.server.change().content_length = None;
    s.server.change().cuts = VecDeque::from([100_000, 0, 0, 0]);
    fails(s.pull(""), &["broke off"]);
    s.server.change().content_length = Some(1 << 60);
    assert_eq!(fs::read(&s.pull("").unwrap().files[0]).unwrap(), bytes);
}

#[test]
fn a_list_without_checksums_is_completed_file_by_file() {
    let bytes = content(0);
    for redirects in [false, true] {
        let s = Setup::with(&[(FILE, &bytes)]);
        s.server.change().bare_list = true;
        s.server.change().redirects = redirects;
        assert_eq!(fs::read(&s.pull("").unwrap().files[0]).unwrap(), bytes);
        let heads = s.server.requests().into_iter().filter(|r| r.method == "HEAD");
        assert_eq!(heads.map(|r| r.to_storage).collect::<Vec<_>>(), [false]);
    }
}

#[test]
fn errors_of_the_hub_name_the_remedy() {
    let s = Setup::with(&[(FILE, &content(0))]);
    s.server.change().refuses_files = Some((401, "GatedRepo"));
    fails(s.pull(""), &["gated", &format!("{}/{REPO}", s.server.url), "HF_TOKEN"]);
    let token = Environment { token: HubToken::new("hf_other", "HF_TOKEN").unwrap(), ..s.environment() };
    s.server.change().refuses_files = Some((403, "GatedRepo"));
    fails(Hub::new(token).pull(&name(""), &mut Quiet), &["gated", "the token in use may not read it"]);
    s.server.change().refuses_files = Some((404, "EntryNotFound"));
    fails(s.pull(""), &["no longer has", FILE]);
    s.server.change().refuses = Some((404, "RepoNotFound"));
    fails(s.pull(""), &["there is no tester/tiny-GGUF on 127.0.0.1"]);
    s.server.change().refuses = Some((500, ""));
    fails(s.pull(""), &["status 500"]);
    let unreachable = Environment { endpoint: "http://127.0.0.1:1".into(), ..s.environment() };
    fails(Hub::new(unreachable).pull(&name(""), &mut Quiet), &["cannot reach 127.0.0.1"]);
}

#[test]
fn the_models_are_listed_if_the_choice_is_ambiguous() {
    let s = Setup::with(&[("a-Q8_0.gguf", &content(0)), ("a-Q2_K.gguf", &content(1)), ("x.txt", &content(2))]);
    fails(s.pull(""), &["several", "\n  Q2_K ", "0.3 MiB  a-Q2_K.gguf", "\n  Q8_0 "]);
    fails(s.pull(":Q4_0"), &["no Q4_0", "\n  Q2_K ", "\n  Q8_0 "]);
    fails(s.pull(":b.gguf"), &["no b.gguf", "a-Q8_0.gguf"]);
    s.server.change().files.drain(..2);
    fails(s.pull(""), &["no GGUF file"]);
    // A path out of the repository does not count as a file.
    s.server.change().files.push(("../../evil-Q4_0.gguf".into(), content(3)));
    fails(s.pull(""), &["no GGUF file"]);
    s.server.change().commit = "../../../evil".into();
    fails(s.pull(""), &["makes no sense", "commit"]);
    assert!(!s.repo().exists());
}

#[test]
fn files_in_deep_folders_are_found_again() {
    for depth in [1, 3, 8, 9, 30, 300] {
        let folders = "abcdef/".repeat(depth);
        let files = [format!("{folders}m-Q4_0-00001-of-00002.gguf"), format!("{folders}m-Q4_0-00002-of-00002.gguf")];
        let s = Setup::with(&[(&files[0], &content(1)), (&files[1], &content(2))]);
        let model = s.pull("").unwrap();
        assert_eq!(fs::read(&model.files[1]).unwrap(), content(2), "{depth}");
        let found = s.hub().find(&name(&format!(":{}", files[1]))).unwrap().unwrap();
        assert_eq!((found.files, found.complete), (model.files, true), "{depth}");
        let removable = s.hub().removable(&name("")).unwrap();
        s.hub().remove(&name(""), &removable).unwrap();
        assert!(!s.repo().exists(), "{depth}");
    }
}

/// Links and pipes that an attacker with access to the cache planted, so that a download would write elsewhere.
#[cfg(unix)]
mod planted {
    use std::os::unix::fs::symlink;
    use std::sync::mpsc;

    use super::*;

    const MINE: &[u8] = b"this is mine";

    /// Puts something at the second path. The first path is a file of the user's.
    type Plant = fn(&Path, &Path);

    /// Pulls `file` after `plant(setup, mine)` has changed the cache. Checks that the user's file `mine` is unchanged.
    fn pull_after(file: &str, plant: impl Fn(&Setup, &Path)) -> (Setup, Result<CachedModel, HubError>) {
        let s = Setup::with(&[(file, &content(0))]);
        let mine = s.folder.path().join("mine.gguf");
        fs::write(&mine, MINE).unwrap();
        for folder in ["blobs", "refs", "snapshots"] {
            fs::create_dir_all(s.repo().join(folder)).unwrap();
        }
        plant(&s, &mine);
        let model = s.pull("");
        assert_eq!(fs::read(&mine).unwrap(), MINE);
        (s, model)
    }

    #[test]
    fn planted_links_in_place_of_files_are_replaced() {
        let bytes = content(0);
        let sha = sha256(&bytes);
        let places = [
            format!("models--tester--tiny-GGUF/blobs/{sha}.incomplete"),
            format!("models--tester--tiny-GGUF/blobs/{sha}"),
            format!("models--tester--tiny-GGUF/snapshots/{COMMIT}/{FILE}"),
            "models--tester--tiny-GGUF/refs/main".into(),
            format!(".locks/models--tester--tiny-GGUF/{sha}.lock"),
        ];
        for place in &places {
            let at = |s: &Setup| {
                let at = s.folder.path().join("hub").join(place);
                fs::create_dir_all(at.parent().unwrap()).unwrap();
                at
            };
            let plants: [(&str, Plant); 4] = [
                ("link", |mine, at| symlink(mine, at).unwrap()),
                ("second name", |mine, at| fs::hard_link(mine, at).unwrap()),
                ("link to nothing", |mine, at| symlink(mine.with_extension("new"), at).unwrap()),
                ("link to itself", |_, at| symlink(at.file_name().unwrap(), at).unwrap()),
            ];
            for (what, plant) in plants {
                let (s, model) = pull_after(FILE, |s, mine| plant(mine, &at(s)));
                let model = model.unwrap_or_else(|e| panic!("{what} at {place}: {e}"));
                assert_eq!(fs::read(&model.files[0]).unwrap(), bytes, "{what} at {place}");
                assert!(!s.folder.path().join("mine.new").exists(), "{what} at {place}");
                assert_eq!(fs::read_to_string(s.repo().join("refs/main")).unwrap(), COMMIT);
                let found = fs::symlink_metadata(s.repo().join("blobs").join(&sha)).unwrap();
                assert!(found.is_file(), "{what} at {place}");
            }
        }
    }

    #[test]
    fn a_link_to_a_file_of_the_same_size_is_no_download() {
        let bytes = content(0);
        let (s, model) = pull_after(FILE, |s, mine| {
            fs::write(mine.with_extension("other"), vec![0; bytes.len()]).unwrap();
            symlink(mine.with_extension("other"), s.repo().join("blobs").join(sha256(&bytes))).unwrap();
        });
        assert_eq!(fs::read(&model.unwrap().files[0]).unwrap(), bytes);
        assert_eq!(fs::read(s.folder.path().join("mine.other")).unwrap(), vec![0; bytes.len()]);
    }

    #[test]
    fn linked_folders_are_rejected() {
        let file = "sub/mine.gguf";
        for place in ["blobs", "refs", "snapshots", &format!("snapshots/{COMMIT}"), &format!("snapshots/{COMMIT}/sub")]
        {
            let (s, model) = pull_after(file, |s, mine| {
                let at = s.repo().join(place);
                let _ = fs::remove_dir(&at);
                fs::create_dir_all(at.parent().unwrap()).unwrap();
                symlink(mine.parent().unwrap(), at).unwrap();
            });
            assert!(matches!(model, Err(HubError::OutsideCache { .. })), "{place}: {model:?}");
            let left: Vec<_> = fs::read_dir(s.folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert_eq!(left.len(), 2, "{place}: {left:?}");
        }
    }

    #[test]
    fn a_linked_repository_works() {
        let (_setup, model) = pull_after(FILE, |s, mine| {
            let elsewhere = mine.with_extension("disk");
            fs::rename(s.repo(), &elsewhere).unwrap();
            symlink(elsewhere, s.repo()).unwrap();
        });
        assert_eq!(fs::read(&model.unwrap().files[0]).unwrap(), content(0));
    }

    #[test]
    fn a_pipe_does_not_block_a_download() {
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || {
            let (_setup, model) = pull_after(FILE, |s, _| {
                let pipe = s.repo().join(format!("blobs/{}.incomplete", sha256(&content(0))));
                assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
            });
            send.send(fs::read(&model.unwrap().files[0]).unwrap()).unwrap();
        });
        assert_eq!(receive.recv_timeout(Duration::from_secs(30)).unwrap(), content(0));
    }
}
