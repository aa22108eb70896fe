// SPDX-License-Identifier: Apache-2.0

#include "tests/conformance/source_suite.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>
#include <map>
#include <set>
#include <thread>

#include "core/base/strings.h"
#include "core/io/file_root.h"
#include "core/io/memory_root.h"
#include "core/manifest/manifest.h"
#include "core/manifest/manifest_check.h"
#include "core/state/assembler.h"
#include "core/store/store.h"
#include "formats/families/shipped.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

namespace files = std::filesystem;
using testing::HasSubstr;

// Reads of a source may touch this much of a tensor where it lies beside a
// header: the fingerprint's two ends, the zip's tail, and what comes along with
// each record's local header.
constexpr uint64_t kFingerprint = 19 * 4096;  // the blocks of one, and a header
constexpr uint64_t kPerTensor = 512;
// The n-th failure is tried for at most about as many n.
constexpr uint64_t kFailuresTried = 400;

// Stamps of a tree: equal while it is as it was; reading changes access times only.
std::map<std::string, std::string> StampsBelow(const std::string& root) {
  std::map<std::string, std::string> out;
  for (const auto& entry : files::recursive_directory_iterator(root)) {
    struct stat info {};
    EXPECT_EQ(::lstat(entry.path().c_str(), &info), 0);
    out[entry.path().string()] =
        StrCat(info.st_ino, " ", info.st_mode, " ", info.st_size, " ", info.st_mtim.tv_sec, ".",
               info.st_mtim.tv_nsec, " ", info.st_ctim.tv_sec, ".", info.st_ctim.tv_nsec);
  }
  return out;
}

// Bytes of each file that hold tensors, and how many tensors it has.
struct TensorBytes {
  std::vector<Extent> extents;
  uint64_t tensors = 0;
};

template <class Function>
void ForEachFragment(const StepModel& model, Function function) {
  for (const Atom& atom : model.atoms) {
    for (const Gather& gather : atom.source.gathers) {
      for (const FragmentSeries& series : gather.series) {
        for (uint32_t k = 0; k < series.count; ++k) function(series.At(k));
      }
    }
  }
}

std::map<std::string, TensorBytes> TensorsOf(const StepModel& model) {
  std::map<std::string, TensorBytes> out;
  ForEachFragment(model, [&](const Fragment& fragment) {
    const Blob& blob = model.blob(fragment.blob);
    TensorBytes& bytes = out[StrCat(model.roots[blob.root], "/", blob.path)];
    const uint64_t length = (fragment.flat_end - fragment.flat_begin) * ByteWidth(fragment.dtype);
    bytes.extents.push_back(Extent{fragment.offset, fragment.offset + length});
    ++bytes.tensors;
  });
  return out;
}

uint64_t Overlap(const IoCall& call, const TensorBytes& bytes) {
  uint64_t sum = 0;
  for (const Extent& range : call.ranges) {
    for (const Extent& extent : bytes.extents) {
      const uint64_t begin = std::max(extent.begin, range.begin);
      const uint64_t end = std::min(extent.end, range.end);
      sum += end > begin ? end - begin : 0;
    }
  }
  return sum;
}

// Overwrites tensor bytes that the fingerprint does not cover; the times stay.
void PoisonTensors(const StepModel& model) {
  for (const auto& [path, bytes] : TensorsOf(model)) {
    const auto time = files::last_write_time(path);
    const uint64_t size = files::file_size(path);
    if (size < 3 * 4096 || size > (1u << 24)) continue;
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    for (const Extent& extent : bytes.extents) {
      const uint64_t begin = std::max<uint64_t>(extent.begin, 4096);
      const uint64_t end = std::min<uint64_t>(extent.end, size - 4096);
      if (begin >= end) continue;
      file.seekp(static_cast<std::streamoff>(begin));
      file << std::string(end - begin, '\xa5');
    }
    file.close();
    files::last_write_time(path, time);
  }
}

// Without what bytes of tensors may change: change times and fingerprints.
std::string WithoutTraces(StepModel model) {
  for (Blob& blob : model.blobs) {
    blob.stamp.ctime_ns = 0;
    blob.fingerprint = Digest{};
  }
  return RenderManifest(model).value();
}

void CheckSources(const StepModel& model) {
  for (const Atom& atom : model.atoms) {
    const std::string name = StrCat(atom.kind, " of ", model.parameter(atom.parameter).name);
    for (const Gather& gather : atom.source.gathers) {
      const Status proof = ProveCoverage(gather, atom.shape);
      EXPECT_TRUE(proof) << name << ": " << proof.error().message;
      for (const FragmentSeries& series : gather.series) {
        const Status inside = CheckSeries(series, gather.locals, model.blobs);
        EXPECT_TRUE(inside) << name << ": " << inside.error().message;
      }
    }
  }
  const Status sources = CheckAtomSources(model);
  EXPECT_TRUE(sources) << sources.error().message;
}

}  // namespace

void SourceSuite::SetUp() {
  sample_ = GetParam().write(directory_.path());
  root_ = std::make_shared<WatchedRoot>(std::make_shared<FileRoot>(directory_.path()));
  source_ = GetParam().source();
  families_ = ShippedFamilies().value();
  options_.families = &families_;
}

std::string SourceSuite::Below(const std::string& path) const {
  return path.substr(directory_.path().size() + 1);
}

Result<StepModel> SourceSuite::ReadAll(const std::string& path) const {
  return ReadFrom(root_, Below(path));
}

Result<StepModel> SourceSuite::ReadFrom(const std::shared_ptr<const Root>& root,
                                        const std::string& path) const {
  CKPT_ASSIGN_OR_RETURN(const auto found, source_->Find(root, path));
  if (found.size() != 1) return Fail(ErrorCode::kNotFound, StrCat(found.size(), " steps"));
  CKPT_RETURN_IF_ERROR(source_->StateOf(found[0], options_, {}).Readable());
  return source_->Read(found[0], options_);
}

StepCandidate SourceSuite::Candidate() const {
  const auto found = source_->Find(root_, Below(sample_.save));
  if (!found || found->size() != 1) {
    ADD_FAILURE() << sample_.save << ": " << (found ? "not one step" : found.error().message);
    return {};
  }
  return found->front();
}

std::string SourceSuite::Manifest() const {
  const auto model = ReadAll(sample_.save);
  EXPECT_TRUE(model) << model.error().message;
  return model ? RenderManifest(*model).value() : "";
}

TEST_P(SourceSuite, FindsASaveDirectoryAndATagByItself) {
  const StepCandidate step = Candidate();
  EXPECT_EQ(step.Path(), sample_.tag);
  EXPECT_EQ(step.SavePath(), sample_.save);
  EXPECT_EQ(step.id, files::path(sample_.tag).filename());
  const auto itself = source_->Find(root_, Below(sample_.tag));
  ASSERT_TRUE(itself) << itself.error().message;
  ASSERT_EQ(itself->size(), 1u);
  EXPECT_EQ((*itself)[0].Path(), sample_.tag);
  EXPECT_EQ((*itself)[0].SavePath(), sample_.save);
  EXPECT_EQ((*itself)[0].id, step.id);
  EXPECT_EQ((*itself)[0].iteration, step.iteration);
  const auto one = ReadAll(sample_.tag);
  ASSERT_TRUE(one) << one.error().message;
  EXPECT_EQ(one->atoms.size(), ReadAll(sample_.save)->atoms.size());
}

TEST_P(SourceSuite, SaysNoToWhatIsNotItsOwn) {
  const TemporaryDirectory others;
  files::create_directories(others.path() + "/empty/deeper");
  others.Write("text/notes.txt", "hello");
  others.Write("text/sub/data.pt", "not one of ours");
  others.Write("hugging/config.json", "{}");
  others.Write("hugging/model-00001-of-00001.safetensors", std::string(64, '\0'));
  std::vector<std::string> strangers = {"empty", "empty/deeper", "text", "text/sub", "hugging"};
  const auto root = std::make_shared<FileRoot>(others.path());
  for (const SourceCase& other : SourceCases()) {
    if (other.source()->name() == source_->name()) continue;
    files::create_directories(others.path() + "/" + other.name);
    const SourceSample sample = other.write(others.path() + "/" + other.name);
    strangers.push_back(sample.save.substr(others.path().size() + 1));
    strangers.push_back(sample.tag.substr(others.path().size() + 1));
  }
  for (const std::string& name : strangers) {
    const auto found = source_->Find(root, name);
    ASSERT_TRUE(found) << name << ": " << found.error().message;
    EXPECT_TRUE(found->empty()) << name;
  }
  const auto missing = source_->Find(root, "missing");
  ASSERT_FALSE(missing);
  EXPECT_THAT(missing.error().message, HasSubstr("/missing"));
}

TEST_P(SourceSuite, DetectionLooksAtNamesOnly) {
  const auto entries = [](const std::string& path) {
    return static_cast<size_t>(std::distance(files::directory_iterator(path), {}));
  };
  root_->Watch();
  ASSERT_TRUE(source_->Find(root_, Below(sample_.save)));
  for (const IoCall& call : root_->calls()) {
    const std::string name = files::path(call.path).filename().string();
    if (name.starts_with("latest")) continue;  // a pointer
    if (name == "metadata.json") continue;     // some bytes that say who wrote the directory
    EXPECT_NE(call.name, "open") << call.path;
  }
  EXPECT_LE(root_->calls().size(), 20 + 8 * (entries(sample_.save) + entries(sample_.tag)));
}

TEST_P(SourceSuite, SaysWhatAnIncompleteStepLacks) {
  ASSERT_FALSE(sample_.needed.empty());
  for (const std::string& name : sample_.needed) {
    const std::string path = StrCat(sample_.tag, "/", name);
    files::rename(path, path + ".away");
    const auto found = source_->Find(root_, Below(sample_.save));
    ASSERT_TRUE(found) << found.error().message;
    ASSERT_EQ(found->size(), 1u) << name;
    const SaveState state = source_->StateOf(found->front(), options_, {});
    ASSERT_TRUE(state.missing) << name;
    EXPECT_EQ(state.phase, SavePhase::kBegun);
    EXPECT_THAT(state.missing->message, HasSubstr(sample_.tag));
    files::rename(path + ".away", path);
  }
  EXPECT_FALSE(source_->StateOf(Candidate(), options_, {}).missing);
}

TEST_P(SourceSuite, WhatItReadsIsProven) {
  const auto model = ReadAll(sample_.save);
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model->framework, source_->name());
  EXPECT_EQ(model->id, files::path(sample_.tag).filename());
  EXPECT_FALSE(model->parameters.empty());
  EXPECT_FALSE(model->atoms.empty());
  CheckSources(*model);
  for (const Blob& blob : model->blobs) {
    EXPECT_TRUE(CheckBlobPath(blob.path)) << blob.path;
    EXPECT_EQ(blob.stamp.size, files::file_size(model->roots[blob.root] + "/" + blob.path));
  }
  for (const Document& document : model->documents) {
    EXPECT_TRUE(ParseDocument(document)) << document.key;
    for (const StoredTensor& tensor : document.tensors) {
      EXPECT_TRUE(CheckStoredTensor(tensor, *model)) << document.key;
    }
  }
  const auto again = ParseManifest(RenderManifest(*model).value());
  EXPECT_TRUE(again) << again.error().message;
}

TEST_P(SourceSuite, NamesAreUnique) {
  const auto model = ReadAll(sample_.save);
  ASSERT_TRUE(model) << model.error().message;
  std::set<std::string> names;
  for (const Parameter& parameter : model->parameters) {
    EXPECT_TRUE(names.insert(parameter.name).second) << parameter.name;
  }
  for (const Alias& alias : model->aliases) {
    EXPECT_TRUE(names.insert(alias.name).second) << alias.name;
  }
}

TEST_P(SourceSuite, TheSameStepEveryTimeAndOnEveryThread) {
  const std::string first = Manifest();
  std::vector<std::string> others(4);
  std::vector<std::thread> threads;
  for (std::string& other : others) {
    threads.emplace_back([&] { other = Manifest(); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& other : others) EXPECT_TRUE(other == first);
}

TEST_P(SourceSuite, NothingIsChanged) {
  const auto before = StampsBelow(directory_.path());
  ASSERT_FALSE(Manifest().empty());
  EXPECT_EQ(StampsBelow(directory_.path()), before);
}

TEST_P(SourceSuite, NoTensorIsRead) {
  const auto model = ReadAll(sample_.save);
  ASSERT_TRUE(model) << model.error().message;
  std::map<std::string, TensorBytes> tensors = TensorsOf(*model);
  std::map<std::string, uint64_t> touched;
  root_->Watch();
  ASSERT_TRUE(ReadAll(sample_.save));
  size_t reads = 0;
  for (const IoCall& call : root_->calls()) {
    if (call.name != "read") continue;
    ++reads;
    touched[call.path] += Overlap(call, tensors[call.path]);
  }
  EXPECT_GT(reads, 0u);
  for (const auto& [path, bytes] : touched) {
    EXPECT_LE(bytes, kFingerprint + kPerTensor * tensors[path].tensors) << path;
  }
}

TEST_P(SourceSuite, TensorBytesDoNotMatter) {
  const auto model = ReadAll(sample_.save);
  ASSERT_TRUE(model) << model.error().message;
  PoisonTensors(*model);
  const auto poisoned = ReadAll(sample_.save);
  ASSERT_TRUE(poisoned) << poisoned.error().message;
  EXPECT_TRUE(WithoutTraces(*poisoned) == WithoutTraces(*model));
}

TEST_P(SourceSuite, EveryFailureIsAnErrorThatNamesTheFile) {
  const std::string whole = Manifest();
  root_->Watch();
  ASSERT_FALSE(Manifest().empty());
  const uint64_t calls = root_->calls().size();
  ASSERT_GT(calls, 0u);
  const uint64_t stride = std::max<uint64_t>(1, calls / kFailuresTried);
  for (uint64_t n = 1; n <= calls; n += stride) {
    root_->Watch(n);
    const auto model = ReadAll(sample_.save);
    const auto failed = root_->failed();
    if (!failed) continue;  // other threads, other order: one call fewer
    ASSERT_FALSE(model) << failed->name << " " << failed->path << " failed unnoticed";
    EXPECT_THAT(model.error().message, HasSubstr(failed->path)) << n << ": " << failed->name;
    EXPECT_NE(model.error().code, ErrorCode::kInternal) << model.error().message;
  }
  root_->Watch();
  EXPECT_TRUE(Manifest() == whole);
}

// A source asks its root and nothing else: the same files in memory are the same step.
TEST_P(SourceSuite, ReadsTheSameFromMemory) {
  std::vector<files::path> links;  // memory does not have them
  for (const auto& entry : files::recursive_directory_iterator(directory_.path())) {
    if (entry.is_symlink()) links.push_back(entry.path());
  }
  for (const files::path& link : links) files::remove(link);
  const auto memory = std::make_shared<MemoryRoot>(directory_.path());
  const FileRoot local(directory_.path());
  const std::vector<std::string> paths = *ListFilesBelow(local, "");
  for (const std::string& path : paths) {
    const auto file = *local.Open(path);
    if (file->size() > (1u << 28)) GTEST_SKIP() << path << " is a hole of " << file->size();
    auto bytes = std::make_shared<const std::string>(*file->Read(0, file->size(), path));
    const auto whole = std::as_bytes(std::span(*bytes));
    const size_t half = whole.size() / 2;
    ASSERT_TRUE(memory->Add(path, {whole.first(half), whole.subspan(half)}, bytes,
                            file->Identity()->access));
  }
  const auto model = ReadAll(sample_.save);
  auto same = ReadFrom(memory, Below(sample_.save));
  ASSERT_TRUE(model) << model.error().message;
  ASSERT_TRUE(same) << same.error().message;
  ASSERT_EQ(same->blobs.size(), model->blobs.size());
  for (size_t i = 0; i < same->blobs.size(); ++i) {
    EXPECT_EQ(same->blobs[i].stamp.size, model->blobs[i].stamp.size);
    same->blobs[i].stamp = model->blobs[i].stamp;
  }
  same->mtime_ns = model->mtime_ns;
  EXPECT_TRUE(RenderManifest(*same).value() == RenderManifest(*model).value());
}

}  // namespace ckptfs
