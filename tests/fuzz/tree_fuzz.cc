// SPDX-License-Identifier: Apache-2.0
//
// Trees: the input says how to make a small directory tree out of the names that the formats
// look for, with links that leave it or lead in circles, fifos, files that nobody may read,
// empty and odd ones.  The search ends in time; a step that it finds is the only one of its
// directory and lies below the given path; and nothing opens a private file beside the tree to
// which links lead.
//
//   byte: what (kMakers)   byte: which name   byte: which content or target of a link
//
// The tree belongs to nobody where that can be said (as root): so its links may lead
// nowhere its owner could not come.

#include <fcntl.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/adopt/scan.h"
#include "core/base/strings.h"
#include "formats/families/shipped.h"
#include "formats/registry.h"
#include "formats/tools/recognise.h"
#include "tests/fuzz/target.h"

namespace {

namespace files = std::filesystem;

constexpr std::array kNames = {"latest",
                               "latest_universal",
                               "global_step5",
                               "global_step6",
                               "checkpoint-500",
                               "checkpoint-600",
                               "checkpoints",
                               "checkpoint",
                               "step-10",
                               "run",
                               "mp_rank_00_model_states.pt",
                               "zero_pp_rank_0_mp_rank_00_model_states.pt",
                               "zero_pp_rank_0_mp_rank_00_optim_states.pt",
                               "layer_00-model_00-model_states.pt",
                               "zero",
                               "optimizer_state.pt",
                               ".metadata",
                               "__0_0.distcp",
                               "__0.metadata",
                               "pytorch_model_fsdp_0",
                               "optimizer_0",
                               "pytorch_model",
                               "model.safetensors",
                               "model.safetensors.index.json",
                               "model-00001-of-00002.safetensors",
                               "pytorch_model.bin",
                               "pytorch_model.bin.index.json",
                               "pytorch_model_fsdp.bin",
                               "optimizer.pt",
                               "optimizer.bin",
                               "trainer_state.json",
                               "training_args.bin",
                               "random_states_0.pkl",
                               "config.json",
                               "adapter_model.safetensors",
                               "adapter_config.json",
                               "modules.json",
                               "1_Pooling",
                               "models--a--b",
                               "snapshots",
                               "epoch=1-step=5.ckpt",
                               "last.ckpt",
                               "common.pt",
                               "metadata.json",
                               "mp_rank_00",
                               "model_optim_rng.pt",
                               "weights",
                               "context",
                               "-",
                               " ",
                               "*",
                               "\xff\xfe",
                               "\n",
                               ".hidden"};

// Directory and file that are a step's, so that a change of one byte leaves one.
constexpr std::string_view kTensor = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
constexpr std::string_view kIndex =
    R"({"metadata":{},"weight_map":{"a":"model-00001-of-00002.safetensors"}})";

std::string Safetensors() {
  std::string out(8, '\0');
  out[0] = static_cast<char>(kTensor.size());
  return out + std::string(kTensor) + std::string(4, '\1');
}

std::string Content(uint8_t which, std::string_view rest) {
  switch (which % 8) {
    case 0: return "";
    case 1: return "global_step5";
    case 2: return "../../outside";
    case 3: return Safetensors();
    case 4: return std::string(kIndex);
    case 5: return R"({"weight_map":{"a":"../outside"}})";
    case 6: return "{}";
    default: return std::string(rest.substr(0, 64));
  }
}

// The tree, what lies beside it, and a watch that hears of each file there that is opened.
class Ground {
 public:
  Ground() {
    std::string name =
        access("/dev/shm", W_OK) == 0 ? "/dev/shm/ckptfs_fuzz_XXXXXX" : "/tmp/ckptfs_fuzz_XXXXXX";
    FUZZ_CHECK(mkdtemp(name.data()) != nullptr);
    top_ = name;
    FUZZ_CHECK(chmod(top_.c_str(), 0755) == 0);
    mkdir(outside().c_str(), 0700);
    for (const char* file : {"model.safetensors", "pytorch_model.bin", "config.json", "secret"}) {
      std::ofstream(outside() + "/" + file) << Safetensors();
      chmod((outside() + "/" + file).c_str(), 0600);
    }
    watch_ = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    FUZZ_CHECK(inotify_add_watch(watch_, outside().c_str(), IN_OPEN) >= 0);
  }
  ~Ground() {
    close(watch_);
    std::error_code ignored;
    files::remove_all(top_, ignored);
  }
  Ground(const Ground&) = delete;
  Ground& operator=(const Ground&) = delete;

  std::string outside() const { return top_ + "/outside"; }
  std::string tree() const { return top_ + "/tree"; }

  void Clear() const {
    std::error_code error;
    files::remove_all(tree(), error);
    FUZZ_CHECK(!error);
    FUZZ_CHECK(mkdir(tree().c_str(), 0755) == 0);
    Give(tree());
  }
  void Give(const std::string& path) const {
    if (geteuid() == 0) FUZZ_CHECK(lchown(path.c_str(), 65534, 65534) == 0);
  }
  // Forgets what it heard.  Directories may be listed.
  bool AFileWasOpened() const {
    alignas(inotify_event) std::array<char, 4096> buffer;
    bool opened = false;
    for (ssize_t got; (got = read(watch_, buffer.data(), buffer.size())) > 0;) {
      for (ssize_t at = 0; at < got;) {
        const auto* event = reinterpret_cast<const inotify_event*>(buffer.data() + at);
        opened |= (event->mask & IN_ISDIR) == 0;
        at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
      }
    }
    return opened;
  }

 private:
  std::string top_;
  int watch_ = -1;
};

void Link(const Ground& ground, const std::string& path, uint8_t which) {
  const std::array<std::string, 11> targets = {
      ".",
      "..",
      "../..",
      ground.tree(),
      ground.outside(),
      ground.outside() + "/model.safetensors",
      "/",
      "/nowhere",
      ckptfs::LastComponent(path),
      kNames[which % kNames.size()],
      ground.outside() + "/" + ckptfs::LastComponent(path)};
  (void)!symlink(targets[which % targets.size()].c_str(), path.c_str());
}

constexpr size_t kBytes = 3 * 48;
constexpr size_t kMakers = 8;

// The tree of an input.
void Build(const Ground& ground, std::string_view script) {
  ground.Clear();
  std::string at = ground.tree();
  for (script = script.substr(0, kBytes); script.size() >= 3; script.remove_prefix(3)) {
    const auto name = static_cast<uint8_t>(script[1]), which = static_cast<uint8_t>(script[2]);
    const std::string path = at + "/" + kNames[name % kNames.size()];
    switch (static_cast<uint8_t>(script[0]) % kMakers) {
      case 0:
      case 1:
        if (mkdir(path.c_str(), 0755) == 0) ground.Give(path);
        if (files::is_directory(files::symlink_status(path))) at = path;
        break;
      case 2:
        if (at != ground.tree()) at = at.substr(0, at.rfind('/'));
        continue;
      case 3: Link(ground, path, which); break;
      case 4: (void)!mkfifo(path.c_str(), 0644); break;
      default: {
        struct stat there {};
        if (lstat(path.c_str(), &there) == 0) continue;  // never through a link, or into a fifo
        std::ofstream(path) << Content(which, script.substr(3));
        if (which > 240) chmod(path.c_str(), 0);
      }
    }
    struct stat there {};
    if (lstat(path.c_str(), &there) == 0) ground.Give(path);
  }
}

void CheckSteps(const std::vector<ckptfs::FoundStep>& steps) {
  std::set<std::string> seen;
  for (const ckptfs::FoundStep& step : steps) {
    const ckptfs::StepCandidate& one = step.candidate;
    FUZZ_CHECK(!one.id.empty() && one.id.find('/') == std::string::npos);
    FUZZ_CHECK(one.directory.starts_with(one.Own()) && one.Own().starts_with(one.save));
    FUZZ_CHECK(one.directory.find("..") == std::string::npos);
    FUZZ_CHECK(seen.insert(one.directory).second);  // two sources, one step
  }
}

void CheckPlace(const std::string& path, const ckptfs::SourceOptions& options) {
  static const auto sources = ckptfs::MakeSources();
  const auto place = ckptfs::PlaceOf(path);
  if (!place) return;
  const auto scan = ckptfs::ScanPlace(*place, sources, ckptfs::HintsOfTools());
  if (!scan) return;
  CheckSteps(scan->steps);
  const auto taken = ckptfs::IngestPlace(*place, sources, options, ckptfs::HintsOfTools());
  if (!taken) return;
  for (const ckptfs::IngestedStep& step : taken->steps) {
    for (const ckptfs::Blob& blob : step.model.blobs) {
      FUZZ_CHECK(blob.side || (!blob.path.empty() && blob.path[0] != '/'));
      FUZZ_CHECK(("/" + blob.path + "/").find("/../") == std::string::npos);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Ground ground;
  static const auto families = ckptfs::ShippedFamilies();
  FUZZ_CHECK(families.has_value());
  Build(ground, std::string_view(reinterpret_cast<const char*>(data), size));
  ckptfs::SourceOptions options;
  options.families = &*families;
  alarm(30);  // no end of it is a crash
  CheckPlace(ground.tree(), options);
  std::error_code ignored;
  for (const auto& inner : files::directory_iterator(ground.tree(), ignored)) {
    // A link that is given is what it leads to.
    if (!inner.is_symlink(ignored)) CheckPlace(inner.path(), options);
  }
  alarm(0);
  FUZZ_CHECK(geteuid() != 0 || !ground.AFileWasOpened());
  return 0;
}
