//! Models in the cache: finding, listing, updating and removing them.

use std::fs;
use std::path::PathBuf;

use metal_attention_hub::{Environment, Hub, HubError, ModelName, Quiet};
use metal_attention_testing::hub_server::{COMMIT, HubServer, REPO, sha256};

const LATER: &str = "ffffffffffffffffffffffffffffffffffffffff";

struct Setup {
    server: HubServer,
    folder: tempfile::TempDir,
}

impl Setup {
    /// A hub with `files`, of which the tensor types `pulled` are in the cache.
    fn with(files: &[(&str, &[u8])], pulled: &[&str]) -> Self {
        let s = Self { server: HubServer::with(files), folder: tempfile::tempdir().unwrap() };
        for quant in pulled {
            s.hub().pull(&name(&format!(":{quant}")), &mut Quiet).unwrap();
        }
        s.server.requests();
        s
    }

    fn hub(&self) -> Hub {
        self.hub_where(false)
    }

    fn hub_where(&self, offline: bool) -> Hub {
        let cache = self.folder.path().join("hub");
        Hub::new(Environment { cache, endpoint: self.server.url.clone(), token: None, offline })
    }

    fn repo(&self) -> PathBuf {
        self.folder.path().join("hub/models--tester--tiny-GGUF")
    }

    fn remove(&self, which: &str) -> Result<usize, HubError> {
        let models = self.hub().removable(&name(which))?;
        self.hub().remove(&name(which), &models)?;
        Ok(models.len())
    }

    fn blobs(&self) -> Vec<String> {
        let entries = fs::read_dir(self.repo().join("blobs")).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }
}

fn name(which: &str) -> ModelName {
    format!("{REPO}{which}").parse().unwrap()
}

fn files() -> [(&'static str, &'static [u8]); 3] {
    [("t-Q4_0.gguf", &[4; 1000]), ("t-Q8_0.gguf", &[8; 2000]), ("same-F16.gguf", &[4; 1000])]
}

#[test]
fn a_cached_model_needs_no_request() {
    let s = Setup::with(&files(), &["Q8_0"]);
    for which in ["", ":q8_0", ":t-Q8_0.gguf"] {
        let model = s.hub().get(&name(which), &mut Quiet).unwrap();
        assert_eq!(fs::read(&model.files[0]).unwrap(), [8; 2000]);
    }
    assert_eq!(s.server.requests(), []);
    // A missing file is downloaded; offline it is an error.
    let error = s.hub_where(true).get(&name(":Q4_0"), &mut Quiet).unwrap_err().to_string();
    assert!(
        error.contains("HF_HUB_OFFLINE")
            && error.contains("the cache has\n  Q8_0 ")
            && error.contains("hf:tester/tiny-GGUF:Q4_0"),
        "{error}"
    );
    assert_eq!(s.hub_where(true).pull(&name(""), &mut Quiet).unwrap().bytes, 2000);
    assert_eq!(s.server.requests(), []);
    assert_eq!(s.hub().get(&name(":Q4_0"), &mut Quiet).unwrap().bytes, 1000);
}

#[test]
fn pull_adds_the_new_version_and_keeps_the_old_one() {
    let s = Setup::with(&files(), &["Q4_0", "Q8_0"]);
    s.server.change().commit = LATER.into();
    s.server.change().files[0].1 = vec![5; 1500];
    assert_eq!(s.hub().get(&name(":Q4_0"), &mut Quiet).unwrap().bytes, 1000);
    assert_eq!(s.hub().pull(&name(":Q4_0"), &mut Quiet).unwrap().bytes, 1500);
    assert_eq!(s.hub().get(&name(":Q4_0"), &mut Quiet).unwrap().bytes, 1500);
    s.server.requests();
    // In the cache only an older commit has Q8_0.
    assert_eq!(s.hub().get(&name(":Q8_0"), &mut Quiet).unwrap().commit, COMMIT);
    assert_eq!(s.server.requests(), []);
    let models = s.hub().models().unwrap();
    let listed: Vec<_> = models.iter().map(|m| (m.name.to_string(), m.bytes, m.is_newest)).collect();
    let named = |quant| format!("hf:{REPO}:{quant}");
    assert_eq!(listed, [(named("Q4_0"), 1500, true), (named("Q4_0"), 1000, false), (named("Q8_0"), 2000, false)]);
    assert_eq!(s.remove(":Q4_0").unwrap(), 2);
    assert_eq!(s.blobs(), [sha256(&[8; 2000])]);
}

#[test]
fn removing_a_file_keeps_blobs_that_others_use() {
    let s = Setup::with(&files(), &["Q4_0", "Q8_0", "F16"]);
    // A file of another program, and a link to a file outside the cache.
    let snapshot = s.repo().join("snapshots").join(COMMIT);
    let outside = s.folder.path().join("outside.gguf");
    fs::write(&outside, "mine").unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink(&outside, snapshot.join("link-Q2_K.gguf")).unwrap();
    fs::write(snapshot.join("config.json"), "{}").unwrap();

    // Q4_0 and F16 are the same bytes, and so the same blob.
    assert_eq!(s.blobs().len(), 2);
    assert_eq!(s.remove(":t-Q4_0.gguf").unwrap(), 1);
    assert_eq!(s.blobs().len(), 2);
    assert_eq!(s.remove(":F16").unwrap(), 1);
    assert_eq!(s.blobs(), [sha256(&[8; 2000])]);
    assert!(matches!(s.remove(":F16"), Err(HubError::NotCached { .. })));
    // The link out of the cache does not count as a model.
    assert_eq!(s.remove("").unwrap(), 1);
    assert_eq!(s.blobs(), <[String; 0]>::default());
    assert_eq!(fs::read_to_string(&outside).unwrap(), "mine");
    assert!(snapshot.join("config.json").exists());
    assert!(s.hub().models().unwrap().is_empty());
}

#[test]
fn the_folder_is_removed_with_the_last_file() {
    let s = Setup::with(&files(), &["Q4_0", "Q8_0"]);
    fs::write(s.repo().join("blobs/abc.incomplete"), "begun").unwrap();
    assert_eq!(s.remove("").unwrap(), 2);
    assert!(!s.repo().exists());
    assert_eq!(fs::read_dir(s.folder.path().join("hub/.locks")).unwrap().count(), 0);

    // An unfinished download can be removed by the repository's name.
    fs::create_dir_all(s.repo().join("blobs")).unwrap();
    fs::write(s.repo().join("blobs/abc.incomplete"), "begun").unwrap();
    assert!(matches!(s.remove(":Q4_0"), Err(HubError::NotCached { .. })));
    assert_eq!(s.remove("").unwrap(), 0);
    assert!(!s.repo().exists());
}

#[cfg(unix)]
#[test]
fn nothing_outside_the_cache_is_removed() {
    let s = Setup::with(&files(), &["Q4_0"]);
    let elsewhere = s.folder.path().join("elsewhere");
    fs::rename(s.repo(), &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, s.repo()).unwrap();
    // A linked repository is found, but not removed.
    assert_eq!(s.hub().models().unwrap().len(), 1);
    assert!(matches!(s.remove(""), Err(HubError::OutsideCache { .. })));
    assert_eq!(fs::read_dir(elsewhere.join("blobs")).unwrap().count(), 1);

    // A linked snapshot is not read.
    fs::remove_file(s.repo()).unwrap();
    fs::create_dir_all(s.repo().join("snapshots")).unwrap();
    let snapshot = elsewhere.join("snapshots").join(COMMIT);
    std::os::unix::fs::symlink(&snapshot, s.repo().join("snapshots").join(COMMIT)).unwrap();
    assert!(s.hub().models().unwrap().is_empty());
    assert!(matches!(s.remove(""), Err(HubError::NotCached { .. })));
    assert!(snapshot.join("t-Q4_0.gguf").exists());
}

#[test]
fn a_reference_with_a_path_is_ignored() {
    let s = Setup::with(&files(), &["Q4_0"]);
    fs::write(s.repo().join("refs/main"), "../../../../etc").unwrap();
    let model = s.hub().find(&name("")).unwrap().unwrap();
    assert_eq!((model.commit.as_str(), model.is_newest), (COMMIT, false));
}

#[cfg(unix)]
#[test]
fn links_in_a_snapshot_must_lead_to_blobs_of_the_repository() {
    use std::os::unix::fs::symlink;
    let s = Setup::with(&files(), &["Q4_0"]);
    let snapshot = s.repo().join("snapshots").join(COMMIT);
    let outside = s.folder.path().join("outside.gguf");
    fs::write(&outside, [9; 1000]).unwrap();
    fs::create_dir(snapshot.join("deep")).unwrap();
    let inside = s.repo().join("blobs").join(sha256(&[4; 1000]));
    // Links to a blob that is a link, to links, to folders, to missing files, and to themselves.
    symlink(&outside, s.repo().join("blobs/planted")).unwrap();
    for (name, target) in [
        ("a-Q2_K.gguf", outside.clone()),
        ("b-Q3_K.gguf", "../../../../outside.gguf".into()),
        ("c-Q5_K.gguf", "../../blobs/planted".into()),
        ("d-Q6_K.gguf", "a-Q2_K.gguf".into()),
        ("e-F32.gguf", "/etc/passwd".into()),
        ("f-F16.gguf", "/dev/zero".into()),
        ("g-BF16.gguf", "../../blobs".into()),
        ("h-Q4_1.gguf", "../../blobs/nothing".into()),
        ("i-Q5_1.gguf", "i-Q5_1.gguf".into()),
        ("j-Q5_0.gguf", "../../refs/main".into()),
        ("folder", s.folder.path().to_owned()),
        ("deep/k-Q1_0.gguf", "../../../blobs/planted".into()),
    ] {
        symlink(target, snapshot.join(name)).unwrap();
    }
    // These lead to a blob of the repository, directly or through another link.
    symlink(&inside, snapshot.join("deep/l-Q8_0.gguf")).unwrap();
    symlink("t-Q4_0.gguf", snapshot.join("m-IQ4_NL.gguf")).unwrap();
    let models = s.hub().models().unwrap();
    let found: Vec<_> = models.iter().map(|model| model.quant.clone().unwrap()).collect();
    assert_eq!(found, ["Q8_0", "IQ4_NL", "Q4_0"]);
    for which in [":Q2_K", ":a-Q2_K.gguf", ":f-F16.gguf", ":deep/k-Q1_0.gguf", ":folder/outside.gguf"] {
        assert!(s.hub().find(&name(which)).unwrap().is_none(), "{which}");
    }
    assert_eq!(fs::read(&outside).unwrap(), [9; 1000]);
}

#[cfg(unix)]
#[test]
fn a_reference_that_is_no_file_is_ignored() {
    let s = Setup::with(&files(), &["Q4_0"]);
    let main = s.repo().join("refs/main");
    for target in ["/dev/zero", "/etc/passwd", "main", "nowhere"] {
        fs::remove_file(&main).unwrap();
        std::os::unix::fs::symlink(target, &main).unwrap();
        assert!(!s.hub().find(&name("")).unwrap().unwrap().is_newest, "{target}");
    }
}

/// The files of a repository whose models see pictures.
fn with_pictures() -> [(&'static str, &'static [u8]); 5] {
    [
        ("t-Q4_0.gguf", &[4; 1000]),
        ("t-Q8_0.gguf", &[8; 2000]),
        ("mmproj-model-bf16.gguf", &[1; 300]),
        ("mmproj-model-f16.gguf", &[2; 300]),
        ("mmproj-model-f32.gguf", &[3; 600]),
    ]
}

#[test]
fn the_mmproj_file_comes_with_a_model_and_goes_with_the_last() {
    let s = Setup::with(&with_pictures(), &["Q4_0", "Q8_0"]);
    let models = s.hub().models().unwrap();
    let mmproj = s.repo().join("snapshots").join(COMMIT).join("mmproj-model-f16.gguf");
    let listed: Vec<_> = models
        .iter()
        .map(|m| (m.quant.as_deref().unwrap(), m.bytes, m.total_bytes(), &m.mmproj.as_ref().unwrap().file))
        .collect();
    assert_eq!(listed, [("Q4_0", 1000, 1300, &mmproj), ("Q8_0", 2000, 2300, &mmproj)]);
    assert_eq!(fs::read(&mmproj).unwrap(), [2; 300]);
    assert_eq!(s.hub_where(true).get(&name(":Q8_0"), &mut Quiet).unwrap().mmproj.unwrap().file, mmproj);

    let removed_with = |which: &str| {
        let models = s.hub().removable(&name(which)).unwrap();
        s.hub().mmproj_removed_with(&name(which), &models).unwrap().len()
    };
    assert_eq!((removed_with(":Q4_0"), removed_with("")), (0, 1));
    assert_eq!(s.remove(":Q4_0").unwrap(), 1);
    assert_eq!(s.blobs().len(), 2);
    assert_eq!(s.remove(":Q8_0").unwrap(), 1);
    assert!(!s.repo().exists());
}

#[test]
fn a_model_may_be_pulled_without_its_mmproj_file() {
    let s = Setup::with(&with_pictures(), &[]);
    let pulled = s.hub().without_mmproj().pull(&name(":Q4_0"), &mut Quiet).unwrap();
    assert_eq!((pulled.mmproj, s.blobs().len()), (None, 1));
    // Its file may be named; then it alone comes, and it is no model where there is another.
    let named = s.hub().pull(&name(":mmproj-model-f32.gguf"), &mut Quiet).unwrap();
    assert_eq!((named.bytes, named.mmproj), (600, None));
    assert_eq!(s.hub().models().unwrap().len(), 1);
    assert_eq!(s.hub().find(&name("")).unwrap().unwrap().mmproj.unwrap().bytes, 600);
    assert!(s.hub().find(&name(":F32")).unwrap().is_none());
    assert!(matches!(s.remove(":F32"), Err(HubError::NotCached { .. })));
    assert_eq!(s.remove(":mmproj-model-f32.gguf").unwrap(), 1);
    assert_eq!(s.remove("").unwrap(), 1);
    assert!(!s.repo().exists());
    // A repository with nothing else in the cache is listed, so that it can be removed.
    s.hub().pull(&name(":mmproj-model-f32.gguf"), &mut Quiet).unwrap();
    assert_eq!(s.hub().models().unwrap().len(), 1);
    assert_eq!(s.remove("").unwrap(), 1);
    assert!(!s.repo().exists());
}

#[test]
fn an_mmproj_file_of_another_commit_or_program_is_found() {
    let s = Setup::with(&with_pictures(), &["Q8_0"]);
    s.server.change().commit = LATER.into();
    let later = s.hub().without_mmproj().pull(&name(":Q4_0"), &mut Quiet).unwrap();
    assert_eq!(later.commit, LATER);
    let of_commit = |commit: &str, file: &str| s.repo().join("snapshots").join(commit).join(file);
    assert_eq!(later.mmproj.unwrap().file, of_commit(COMMIT, "mmproj-model-f16.gguf"));
    // A copy in the place of a link, as another program may make it.
    fs::write(of_commit(LATER, "mmproj-model-Q8_0.gguf"), [7; 100]).unwrap();
    let found = s.hub().find(&name(":Q4_0")).unwrap().unwrap();
    assert_eq!(found.mmproj.unwrap().file, of_commit(LATER, "mmproj-model-Q8_0.gguf"));
}
