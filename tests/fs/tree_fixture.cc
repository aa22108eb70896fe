// SPDX-License-Identifier: Apache-2.0

#include "tests/fs/tree_fixture.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/blob/fingerprint.h"
#include "core/io/file_root.h"
#include "core/io/memory_root.h"
#include "core/tensor/piece.h"
#include "tests/support/stamp_of_file.h"

namespace ckptfs::testing {
namespace {

constexpr uint64_t kBigBytes = kRows * kColumns * 4;
constexpr uint64_t kOddElements = 3;
constexpr std::string_view kHead = "model of the rank\n";
constexpr std::string_view kSmall = "{\"small\": true}\n";
constexpr std::string_view kNote = "a note\n";

std::string OddBytes(uint32_t seed) {
  std::string bytes(kOddElements * 4, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(seed * 7 + i);
  return bytes;
}

uint64_t RowsOf(const Layout& layout) { return kRows / layout.tp; }

uint64_t ModelSize(const Layout& layout) {
  const uint64_t bytes = kHead.size() + RowsOf(layout) * kColumns * 4;
  return (bytes + 4095) / 4096 * 4096;
}

// rank<N> -> N, if there is such a rank.
std::optional<uint64_t> RankOf(std::string_view name, const Layout& layout) {
  if (!name.starts_with("rank")) return std::nullopt;
  const uint64_t rank = std::strtoull(std::string(name.substr(4)).c_str(), nullptr, 10);
  if (rank >= layout.World() || StrCat("rank", rank) != name) return std::nullopt;
  return rank;
}

std::pair<std::string_view, std::string_view> SplitPath(std::string_view path) {
  const size_t slash = path.find('/');
  if (slash == std::string_view::npos) return {path, {}};
  return {path.substr(0, slash), path.substr(slash + 1)};
}

std::vector<ViewEntry> RankEntries(const StepModel& step, const Layout& layout) {
  using Type = ViewEntry::Type;
  return {{"link", Type::kSymlink, 9, "model.bin"},
          {"model.bin", Type::kFile, ModelSize(layout), ""},
          {"small.json", Type::kFile, kSmall.size(), ""},
          {"whole.bin", Type::kFile, step.blobs[0].stamp.size, ""}};
}

StepModel MakeModel(const std::string& id, uint64_t iteration, const std::string& root,
                    const Blob& blob) {
  StepModel model;
  model.framework = "fake";
  model.id = id;
  model.iteration = iteration;
  model.mtime_ns = 1'700'000'000'000'000'000 + static_cast<int64_t>(iteration);
  model.roots = {root};
  model.blobs = {blob};
  const auto add = [&](std::string name, Shape shape, std::string kind, uint64_t offset) {
    Parameter parameter;
    parameter.name = std::move(name);
    parameter.shape = shape;
    parameter.pattern = shape.size() > 1 ? Pattern::Shard(0) : Pattern::Replicate();
    Atom atom;
    atom.parameter = ParameterIndex{static_cast<uint32_t>(model.parameters.size())};
    atom.kind = std::move(kind);
    atom.shape = shape;
    Gather gather;
    gather.locals = {WholeTensor(shape)};
    FragmentSeries series;
    series.elements = ElementCount(shape).value();
    series.offset = offset;
    gather.series = {series};
    atom.source.gathers = {std::move(gather)};
    model.parameters.push_back(std::move(parameter));
    model.atoms.push_back(std::move(atom));
  };
  add("big.weight", {kRows, kColumns}, "weight", 0);
  add("odd/../name", {kOddElements}, "exp_avg", kBigBytes);
  model.aliases = {{"tied.weight", ParameterIndex{0}}};
  return model;
}

class FakeView : public View {
 public:
  FakeView(const FakeFormat& format, std::shared_ptr<const StepModel> step, const Layout& layout)
      : View(step), format_(format), step_(std::move(step)), layout_(layout) {}

  Result<std::vector<ViewEntry>> List(std::string_view directory) const override;
  Result<ViewEntry> Find(std::string_view path) const override;
  Result<Plan> MakePlan(std::string_view file) const override;
  uint64_t MemoryBytes() const override { return format_.view_bytes; }

 private:
  const FakeFormat& format_;
  const std::shared_ptr<const StepModel> step_;
  const Layout layout_;
};

Result<std::vector<ViewEntry>> FakeView::List(std::string_view directory) const {
  ++format_.lists;
  std::vector<ViewEntry> entries;
  if (directory.empty()) {
    for (uint64_t rank = 0; rank < layout_.World(); ++rank) {
      entries.push_back({StrCat("rank", rank), ViewEntry::Type::kDirectory, 0, ""});
    }
    entries.push_back({"extra", ViewEntry::Type::kDirectory, 0, ""});
    return entries;
  }
  if (directory == "extra") {
    entries.push_back({"note", ViewEntry::Type::kFile, kNote.size(), ""});
    return entries;
  }
  if (RankOf(directory, layout_)) return RankEntries(*step_, layout_);
  return Fail(ErrorCode::kNotFound, std::string(directory));
}

Result<ViewEntry> FakeView::Find(std::string_view path) const {
  ++format_.finds;
  const auto [top, name] = SplitPath(path);
  if (name.empty()) {
    if (top == "extra" || RankOf(top, layout_)) {
      return ViewEntry{std::string(top), ViewEntry::Type::kDirectory, 0, ""};
    }
    return Fail(ErrorCode::kNotFound, std::string(path));
  }
  CKPT_ASSIGN_OR_RETURN(const std::vector<ViewEntry> entries, List(top));
  for (const ViewEntry& entry : entries) {
    if (entry.name == name) return entry;
  }
  return Fail(ErrorCode::kNotFound, std::string(path));
}

Result<Plan> FakeView::MakePlan(std::string_view file) const {
  ++format_.plans;
  const auto [top, name] = SplitPath(file);
  PlanBuilder plan;
  if (name == "note") plan.Literal(std::string(kNote));
  if (name == "small.json") plan.Literal(std::string(kSmall));
  if (name == "whole.bin") plan.BlobRange(BlobIndex{0}, 0, step_->blobs[0].stamp.size);
  if (name == "model.bin") {
    const uint64_t rank = RankOf(top, layout_).value();
    const uint64_t elements = RowsOf(layout_) * kColumns;
    const uint64_t begin = rank % layout_.tp * elements;
    plan.Literal(std::string(kHead));
    plan.Atom(AtomIndex{0}, std::make_shared<const LocalTensor>(WholeTensor({kRows, kColumns})),
              begin, begin + elements, DType::kF32);
    plan.Zeros(ModelSize(layout_) - plan.size());
  }
  return std::move(plan).Finish();
}

}  // namespace

Result<std::shared_ptr<const View>> FakeFormat::Open(
    std::shared_ptr<const ShownState> shown) const {
  const Layout& layout = shown->layout();
  ++opens;
  if (throws.fetch_sub(1) > 0) throw std::bad_alloc();
  throws = 0;
  if (layout.tp <= max_tp && kRows % layout.tp == 0) {
    return std::make_shared<const FakeView>(*this, shown->shared_step(), layout);
  }
  return Fail(ErrorCode::kUnsupported, StrCat("tp ", layout.tp, " does not fit"));
}

std::string TreeFixture::SourceBytes(uint32_t seed) {
  std::string bytes(kBigBytes, '\0');
  for (uint64_t i = 0; i < kBigBytes / 4; ++i) {
    const float value = static_cast<float>(i % 100'003) + static_cast<float>(seed) / 16;
    std::memcpy(bytes.data() + i * 4, &value, 4);
  }
  return bytes + OddBytes(seed);
}

std::string TreeFixture::Expected(uint32_t seed, const Layout& layout, std::string_view path) {
  const auto [top, name] = SplitPath(path);
  if (name == "note") return std::string(kNote);
  if (name == "small.json") return std::string(kSmall);
  if (name == "whole.bin") return SourceBytes(seed);
  const uint64_t slice = RowsOf(layout) * kColumns * 4;
  std::string bytes(kHead);
  bytes += SourceBytes(seed).substr(RankOf(top, layout).value() % layout.tp * slice, slice);
  bytes.resize(ModelSize(layout), '\0');
  return bytes;
}

TreeFixture::TreeFixture() : TreeFixture(std::vector<std::unique_ptr<ViewFormat>>()) {
  auto format = std::make_unique<FakeFormat>();
  format_ = format.get();
  formats_.push_back(std::move(format));
}

TreeFixture::TreeFixture(std::vector<std::unique_ptr<ViewFormat>> formats)
    : formats_(std::move(formats)), log_(std::make_shared<LogLines>()) {
  std::string pattern = (std::filesystem::temp_directory_path() / "ckptfs_fs_XXXXXX").string();
  directory_ = mkdtemp(pattern.data());
  chmod(directory_.c_str(), 0755);
  store_ = Store::Open(directory_ / "store", true).value();
  catalogue_ = std::make_unique<StepCatalogue>(*store_);
}

TreeFixture::~TreeFixture() {
  filesystem_.reset();
  catalogue_.reset();
  store_.reset();
  std::filesystem::remove_all(directory_);
}

std::string TreeFixture::SourcePath(const std::string& run, const std::string& id,
                                    const std::string& file) const {
  return directory_ / "source" / run / id / file;
}

void TreeFixture::WriteOldSource(const std::string& run, const std::string& id, uint32_t seed) {
  const std::string path = SourcePath(run, id);
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << SourceBytes(seed);
  const timespec times[2] = {{1000, 0}, {1000, 0}};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

StepRecord TreeFixture::AddStep(const std::string& run, const std::string& id, uint64_t iteration,
                                uint32_t seed, uint32_t mode, const std::string& file) {
  const std::string path = SourcePath(run, id, file);
  const std::string root = directory_ / "source" / run;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ifstream before(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(before), {}};
  if (bytes != SourceBytes(seed)) {
    std::ofstream(path, std::ios::binary) << SourceBytes(seed);
    chmod(path.c_str(), mode);
  }
  Blob blob;
  blob.path = id + "/" + file;
  blob.stamp = StampOfFile(StrCat(root, "/", blob.path)).value();
  blob.fingerprint = FingerprintOf(**OpenLocalFile(path)).value();
  blob.chunk_bytes = kChunkBytes;
  blob.chunks = ChunkDigestsOf(SourceBytes(seed));
  blob.mode = mode;
  blob.uid = geteuid();
  blob.gid = getegid();
  const StepModel model = MakeModel(id, iteration, root, blob);
  return store_->Publish(run, model, StrCat(root, "/", id), root).value();
}

StepRecord TreeFixture::HoldStep(const std::string& run, const std::string& id, uint64_t iteration,
                                 uint32_t seed, size_t piece,
                                 std::weak_ptr<const std::string>* bytes, StepPlace place) {
  const auto owner = std::make_shared<const std::string>(SourceBytes(seed));
  *bytes = owner;
  const auto all = std::as_bytes(std::span(*owner));
  std::vector<std::span<const std::byte>> rope;
  for (size_t at = 0; at < all.size(); at += piece) {
    rope.push_back(all.subspan(at, std::min(piece, all.size() - at)));
  }
  Blob blob;
  blob.path = StrCat(run, "/", id, "/data.bin");
  blob.stamp.size = owner->size();
  blob.store_owned = true;
  blob.chunk_bytes = kChunkBytes;
  blob.chunks = ChunkDigestsOf(*owner);
  blob.mode = 0644;
  blob.uid = geteuid();
  blob.gid = getegid();
  auto memory = std::make_shared<MemoryRoot>(store_->blobs());
  const OwnerAndMode access{blob.mode, blob.uid, blob.gid, false};
  EXPECT_TRUE(memory->Add(blob.path, std::move(rope), owner, access));
  const std::string root = directory_ / "source" / run;
  MemoryStep step{run, StrCat(root, "/", id), root, MakeModel(id, iteration, store_->blobs(), blob),
                  std::move(memory)};
  if (place == StepPlace::kMemory) return catalogue_->ShowMemory(std::move(step)).value();
  return catalogue_->Hold(std::move(step)).value();
}

Filesystem& TreeFixture::Mount(FilesystemOptions options) {
  if (!options.log) {
    options.log = [log = log_](std::string_view line) {
      MutexLock lock(log->mutex);
      log->lines.emplace_back(line);
    };
  }
  filesystem_ = Filesystem::Create(*catalogue_, formats_, std::move(options)).value();
  return *filesystem_;
}

std::vector<std::string> TreeFixture::Log() const {
  MutexLock lock(log_->mutex);
  return log_->lines;
}

Result<Attributes> TreeFixture::Walk(std::string_view path, const Caller& caller) {
  std::string rest(path);
  std::string walked;  // components, links resolved
  InodeNumber at = kRootInode;
  CKPT_ASSIGN_OR_RETURN(Attributes attributes, filesystem_->GetAttributes(at, caller));
  for (int links = 0; !rest.empty();) {
    const auto [name, tail] = SplitPath(rest);
    if (name.empty()) {
      rest = std::string(tail);
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(attributes, filesystem_->Lookup(at, name, caller));
    if (S_ISLNK(attributes.mode)) {
      if (++links > 8) return Fail(ErrorCode::kInvalid, "too many links");
      CKPT_ASSIGN_OR_RETURN(const std::string target,
                            filesystem_->ReadLink(attributes.inode, caller));
      rest = StrCat(walked, "/", target, "/", tail);
      walked.clear();
      at = kRootInode;
      continue;
    }
    walked += StrCat("/", name);
    at = attributes.inode;
    rest = std::string(tail);
  }
  return attributes;
}

Result<std::vector<std::string>> TreeFixture::List(std::string_view path, const Caller& caller) {
  CKPT_ASSIGN_OR_RETURN(const Attributes directory, Walk(path, caller));
  std::vector<std::string> names;
  for (uint64_t offset = 0;;) {
    CKPT_ASSIGN_OR_RETURN(const auto entries,
                          filesystem_->ReadDirectory(directory.inode, offset, 3, caller));
    if (entries.empty()) break;
    for (const DirectoryEntry& entry : entries) {
      if (entry.name != "." && entry.name != "..") names.push_back(entry.name);
    }
    offset = entries.back().next_offset;
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<Accident> Accidents() {
  const auto write = [](const std::string& path, bool flip) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const auto at = static_cast<std::streamoff>(std::filesystem::file_size(path) * 9 / 10);
    file.seekg(at);
    const char byte = static_cast<char>(file.get());
    file.seekp(at);
    file.put(static_cast<char>(flip ? byte ^ 1 : byte));
  };
  std::vector<Accident> all{
      {"chmod", [](const std::string& path) { chmod(path.c_str(), 0600); }},
      {"link",
       [](const std::string& path) { EXPECT_EQ(link(path.c_str(), (path + "2").c_str()), 0); }},
      {"touch", [](const std::string& path) { utimensat(AT_FDCWD, path.c_str(), nullptr, 0); }},
      {"written alike", [write](const std::string& path) { write(path, false); }},
      {"written and put back",
       [write](const std::string& path) { write(path, true), write(path, true); }},
      {"written", [write](const std::string& path) { write(path, true); }, false},
      {"cut", [](const std::string& path) { std::filesystem::resize_file(path, 5000); }, false},
      {"exchanged",
       [](const std::string& path) {
         std::filesystem::copy_file(path, path + ".new");
         std::filesystem::rename(path + ".new", path);
       },
       false},
      {"gone", [](const std::string& path) { std::filesystem::remove(path); }, false}};
  if (geteuid() == 0) {
    all.push_back(
        {"chown", [](const std::string& path) { EXPECT_EQ(chown(path.c_str(), 7, 7), 0); }});
  }
  return all;
}

Result<std::string> ReadHandle(Filesystem& fs, FileHandle handle, size_t piece) {
  std::string bytes;
  std::vector<std::byte> buffer(piece);
  while (true) {
    CKPT_ASSIGN_OR_RETURN(const size_t count, fs.Read(handle, bytes.size(), buffer));
    bytes.append(reinterpret_cast<const char*>(buffer.data()), count);
    if (count < piece) return bytes;
  }
}

Result<std::string> TreeFixture::ReadAll(std::string_view path, const Caller& caller) {
  CKPT_ASSIGN_OR_RETURN(const Attributes file, Walk(path, caller));
  CKPT_ASSIGN_OR_RETURN(const OpenFile open, filesystem_->Open(file.inode, 0, caller));
  Result<std::string> bytes = ReadHandle(*filesystem_, open.handle);
  filesystem_->Release(open.handle);
  return bytes;
}

}  // namespace ckptfs::testing
