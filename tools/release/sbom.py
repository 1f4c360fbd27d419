"""The crates in the program as a CycloneDX document."""

import json
import subprocess
import tomllib


def write(root, file, version, date, address):
    """Those crates that the program is built from on any system, from `cargo metadata` and the checksums of Cargo.lock."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--manifest-path", root / "Cargo.toml"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"tools/release/make: cargo metadata failed, so there is no list of crates:\n{done.stderr}")
    metadata = json.loads(done.stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    # What tests alone need is not in the program.
    needs = {
        node["id"]: sorted({dep["pkg"] for dep in node["deps"] if any(kind["kind"] != "dev" for kind in dep["dep_kinds"])})
        for node in metadata["resolve"]["nodes"]
    }
    program = next(id for id, package in packages.items() if package["name"] == "metal-attention-cli")
    reached, open_ones = set(), [program]
    while open_ones:
        id = open_ones.pop()
        if id not in reached:
            reached.add(id)
            open_ones += needs[id]
    lock = tomllib.loads((root / "Cargo.lock").read_text())
    checksums = {(package["name"], package["version"]): package.get("checksum") for package in lock["package"]}

    def reference(id):
        return f"pkg:cargo/{packages[id]['name']}@{packages[id]['version']}"

    def component(id):
        package = packages[id]
        out = {
            "type": "application" if id == program else "library",
            "bom-ref": reference(id),
            "name": package["name"],
            "version": package["version"],
            "purl": reference(id),
        }
        if package["description"]:
            out["description"] = " ".join(package["description"].split())
        if package["license"]:
            # Before 2018 "/" stood for "OR".
            out["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
        checksum = checksums.get((package["name"], package["version"]))
        if checksum:
            out["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        if id == program and address:
            out["externalReferences"] = [{"type": "vcs", "url": address}]
        return out

    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"timestamp": f"{date}T00:00:00Z", "component": component(program)},
        "components": [component(id) for id in sorted(reached - {program})],
        "dependencies": [{"ref": reference(id), "dependsOn": [reference(need) for need in needs[id]]} for id in sorted(reached)],
    }
    file.write_text(json.dumps(document, indent=1) + "\n")
