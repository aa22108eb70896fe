// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/compact.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "core/adopt/publish.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/blob/chunk_list.h"
#include "core/check/verify.h"
#include "core/io/file_root.h"
#include "core/store/collect.h"
#include "tests/core/adopt/pieces.h"
#include "tests/support/stamp_of_file.h"

namespace ckptfs {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing_support::Pieces;
using testing_support::ReadWhole;

class CompactTest : public testing::Test {
 protected:
  CompactTest() {
    Add("norm", "master", 256, DType::kF32);
    Add("big", "master", 32 * 20000, DType::kF32);
    Add("big", "exp_avg", 32 * 20000, DType::kF32);
    Add("half", "weight", 32 * 1001, DType::kBF16);
    Add("bytes", "state", 77, DType::kU8);
    pieces_.Write();
    store_ = *Store::Open(directory_.path() + "/store", true);
  }
  void Add(const std::string& name, const std::string& kind, uint64_t elements, DType dtype) {
    atoms_.push_back(pieces_.Add(name, kind, elements, dtype));
  }
  StepRecord Publish(const StepModel& model) {
    PublishRequest request;
    request.run = "run";
    request.source = pieces_.directory();
    request.root = "/root";
    request.check = false;
    auto done = PublishStep(*store_, model, request);
    EXPECT_TRUE(done) << done.error().message;
    return done->record;
  }
  StepRecord Publish() { return Publish(pieces_.model()); }
  static CompactRequest Request() {
    CompactRequest request;
    request.file_bytes = 1 << 20;
    request.job.threads = 2;
    request.shown_whole = [](const StepModel& model) {
      return std::vector<uint8_t>(model.blobs.size(), 0);
    };
    return request;
  }
  Result<CompactReport> Compact(const StepRecord& record) {
    return CompactStep(*store_, record, Request());
  }
  StepModel Load(const StepRecord& record) { return (*store_->Load(record))->model; }
  void RemoveSource() const { fs::remove_all(pieces_.directory()); }
  void ExpectTruth(const StepModel& model) {
    for (const AtomIndex atom : atoms_) {
      EXPECT_TRUE(ReadWhole(model, atom) == Pieces::Truth(pieces_.model(), atom));
    }
    const auto report = VerifyStep(model, *BlobReader::Create(model, {}), {});
    ASSERT_TRUE(report) << report.error().message;
    for (const VerifyDefect& defect : report->defects) {
      ADD_FAILURE() << defect.subject << ": " << defect.rule;
    }
    EXPECT_EQ(report->summed_bytes, report->blob_bytes);
  }
  std::vector<std::string> Blobs() const {
    std::vector<std::string> names;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(store_->blobs(), none)) {
      names.push_back(entry.path().filename().string());
    }
    std::erase(names, "side");
    return names;
  }

  Pieces pieces_;
  std::vector<AtomIndex> atoms_;
  TemporaryDirectory directory_;
  std::unique_ptr<Store> store_;
};

TEST_F(CompactTest, EveryAtomIsWholeInOneOfSomeFilesOfOneSize) {
  const StepRecord before = Publish();
  const auto report = Compact(before);
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_TRUE(report->done);
  EXPECT_EQ(report->tensors, 5u);
  EXPECT_EQ(report->kept_files, 0u);
  EXPECT_EQ(report->record.unpacked, before.unpacked);
  EXPECT_TRUE(report->record.compacted);
  RemoveSource();
  const StepModel model = Load(report->record);
  ExpectTruth(model);
  EXPECT_GE(report->packed_files, 2u);
  uint64_t least = UINT64_MAX, greatest = 0, listed = 0;
  for (const Blob& blob : model.blobs) {
    EXPECT_TRUE(blob.owned());
    EXPECT_EQ(blob.chunk_bytes, 256u << 10);
    EXPECT_EQ(blob.chunk_list != Digest{}, blob.stamp.size > kInlineChunks * kChunkBytes);
    const FileRoot root(model.roots[blob.root]);
    const auto list = blob.chunk_list == Digest{} ? Result<std::vector<Digest>>(blob.chunks)
                                                  : ReadChunkList(root, blob);
    ASSERT_TRUE(list) << list.error().message;
    EXPECT_EQ(*list, ChunkDigestsOf(*ReadWhole(root, blob.path, 1 << 30)));
    listed += blob.chunk_list != Digest{} ? 1 : 0;
    least = std::min(least, blob.stamp.size);
    greatest = std::max(greatest, blob.stamp.size);
  }
  EXPECT_LE(greatest - least, 32 * 20000 * sizeof(float) + 4096);
  EXPECT_GT(listed, 0u);
  for (const Atom& atom : model.atoms) {
    ASSERT_THAT(atom.source.gathers, SizeIs(1));
    EXPECT_THAT(atom.source.gathers[0].series, SizeIs(1));
  }
  // Adopting the source again finds it.
  const auto found = store_->FindPublished("run", "step1", *store_->Render(pieces_.model()));
  ASSERT_TRUE(found && *found);
  EXPECT_EQ((*found)->manifest, report->record.manifest);
}

TEST_F(CompactTest, WhatIsPackedAlreadyStaysWhereItIs) {
  const auto first = Compact(Publish());
  ASSERT_TRUE(first) << first.error().message;
  const auto again = Compact(first->record);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_FALSE(again->done);
  EXPECT_EQ(again->in_place, first->packed_files);
  EXPECT_EQ(again->record.manifest, first->record.manifest);
  EXPECT_THAT(Blobs(), SizeIs(1));
}

// Averages are stored as they are shown, in the atom's own dtype; copies are one.
TEST_F(CompactTest, AveragesAndCopiesBecomeOneTensor) {
  StepModel model = pieces_.model();
  const Gather whole = model.atom(atoms_[3]).source.gathers[0];
  model.atoms[3].source = AverageSource({whole, whole, whole});
  const Gather master = model.atom(atoms_[1]).source.gathers[0];
  model.atoms[1].source = ReplicaSource({master, master});
  model.BuildIndex();
  const std::string average = ReadWhole(model, atoms_[3]);
  const auto report = Compact(Publish(model));
  ASSERT_TRUE(report) << report.error().message;
  RemoveSource();
  const StepModel now = Load(report->record);
  EXPECT_EQ(now.atoms[3].source.kind, SourceKind::kGather);
  EXPECT_EQ(now.atoms[1].source.kind, SourceKind::kGather);
  EXPECT_TRUE(ReadWhole(now, atoms_[3]) == average);
  EXPECT_TRUE(ReadWhole(now, atoms_[1]) == Pieces::Truth(model, atoms_[1]));
}

// A rank held a third of each value: what is read at the source's own degree must not be
// multiplied and divided again.
TEST_F(CompactTest, ScaledPiecesStayAsRanksHadThem) {
  StepModel model = pieces_.model();
  for (LocalTensor& local : model.atoms[1].source.gathers[0].locals) {
    for (Piece& piece : local.pieces) piece.scale = 1.0 / 3;
  }
  model.BuildIndex();
  const std::string before = ReadWhole(model, atoms_[1]);
  const auto report = Compact(Publish(model));
  ASSERT_TRUE(report) << report.error().message;
  RemoveSource();
  const StepModel now = Load(report->record);
  EXPECT_TRUE(ReadWhole(now, atoms_[1]) == before);
  const Gather& gather = now.atoms[1].source.gathers[0];
  EXPECT_EQ(gather.locals[0].pieces[0].scale, 1.0 / 3);
  // The bytes are the ranks'.
  const auto blobs = BlobReader::Create(now, {});
  std::string bytes(16, '?');
  const Fragment last = gather.series[0].At(Pieces::kRanks - 1);
  ASSERT_TRUE(blobs->Read(last.blob, last.offset, std::as_writable_bytes(std::span(bytes))));
  EXPECT_EQ(bytes, Pieces::Truth(model, atoms_[1]).substr(last.flat_begin * 4, 16));
}

TEST_F(CompactTest, TensorsOfDocumentsMoveToo) {
  StepModel model = pieces_.model();
  const StoredTensor one{DType::kU8, {2, 100}, {300, 1}, BlobIndex{3}, 8000, {}};
  const StoredTensor inside{DType::kU8, {50}, {1}, BlobIndex{3}, 8150, {}};
  const StoredTensor none{DType::kU8, {0}, {1}, BlobIndex{31}, 5, {}};
  model.documents.push_back(Document{"rng", "", "N.", {one, inside, none}});
  model.BuildIndex();
  const auto read = [](const StepModel& of, size_t tensor, uint64_t at, size_t length) {
    const StoredTensor& where = of.documents[0].tensors[tensor];
    std::string bytes(length, '?');
    const auto blobs = BlobReader::Create(of, {});
    EXPECT_TRUE(
        blobs->Read(where.blob, where.offset + at, std::as_writable_bytes(std::span(bytes))));
    return bytes;
  };
  const std::string first = read(model, 0, 300, 100), second = read(model, 1, 0, 50);
  const auto report = Compact(Publish(model));
  ASSERT_TRUE(report) << report.error().message;
  RemoveSource();
  const StepModel now = Load(report->record);
  EXPECT_EQ(read(now, 0, 300, 100), first);
  EXPECT_EQ(read(now, 1, 0, 50), second);
}

TEST_F(CompactTest, ItGoesOnWhereItWasKilled) {
  const StepRecord record = Publish();
  uint64_t points = 0;
  for (bool killed = true; killed; ++points) {
    ASSERT_LT(points, 100u);
    const pid_t pid = fork();
    if (pid == 0) {
      setenv("CKPTFS_KILL_AT", StrCat(points + 1).c_str(), 1);
      auto mine = Store::Open(store_->directory(), false);
      CompactRequest request = Request();
      request.job.threads = 1;
      const auto done = CompactStep(**mine, record, request);
      _exit(done ? 0 : 1);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    killed = WIFSIGNALED(status);
    ASSERT_TRUE(killed || WEXITSTATUS(status) == 0) << points;
    ASSERT_TRUE(store_->Refresh());
    const auto steps = store_->Steps("run");
    ASSERT_TRUE(steps);
    ASSERT_THAT(*steps, SizeIs(1));
    const StepModel model = Load(steps->front());
    for (const AtomIndex atom : atoms_) {
      ASSERT_TRUE(ReadWhole(model, atom) == Pieces::Truth(pieces_.model(), atom)) << points;
    }
    if (steps->front().compacted) break;  // killed after it was published
  }
  EXPECT_GE(points, 5u);
  EXPECT_THAT(Blobs(), SizeIs(1));
  RemoveSource();
  ExpectTruth(Load(store_->Steps("run")->front()));
}

TEST_F(CompactTest, AStepThatWentOrChangedMeanwhileIsNotMadeAgain) {
  const StepRecord record = Publish();
  const auto step = store_->Load(record);
  const auto rendered = store_->Render((*step)->model, record.unpacked);
  StepRecord other = record;
  other.manifest = DigestOf("another");
  const auto stale = store_->Replace(other, (*step)->model, *rendered);
  ASSERT_FALSE(stale);
  EXPECT_EQ(stale.error().code, ErrorCode::kStale);
  ASSERT_TRUE(store_->Remove(record));
  const auto gone = store_->Replace(record, (*step)->model, *rendered);
  ASSERT_FALSE(gone);
  EXPECT_EQ(gone.error().code, ErrorCode::kNotFound);
  EXPECT_FALSE(store_->Steps("run"));
}

TEST_F(CompactTest, WhatIsNotCompleteIsRefusedByName) {
  StepModel model = pieces_.model();
  model.left_out.push_back(
      {LeftOutPart::kOptimizer, "the scheduler", "it is odd", "straighten it", 2});
  const StepRecord record = Publish(model);
  const auto refused = Compact(record);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(refused.error().message, HasSubstr("run/step1"));
  EXPECT_THAT(refused.error().message, HasSubstr("the scheduler and 2 more: it is odd"));
  EXPECT_THAT(refused.error().message, HasSubstr("--incomplete"));
  CompactRequest request = Request();
  request.incomplete = true;
  EXPECT_TRUE(CompactStep(*store_, record, request));
}

// An expanded tensor has few bytes and any size.
TEST_F(CompactTest, TensorsThatRepeatBytesDoNotFillTheStore) {
  StepModel model = pieces_.model();
  Atom& atom = model.atoms[1];
  const uint64_t rows = uint64_t{1} << 30;
  atom.shape = model.parameters[1].shape = {rows, 4};
  FragmentSeries series;
  series.elements = series.flat_step = 4;
  series.dtype = DType::kF32;
  atom.source = AtomSource();
  atom.source.gathers = {Gather{{StridedView(atom.shape, 4, 0, {0, 1})}, {series}}};
  model.atoms[2].shape = {1};
  model.atoms[2].relation = Relation::kScalar;
  model.atoms[2].source = InlineSource("abcd", false);
  model.BuildIndex();
  const auto refused = Compact(Publish(model));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(refused.error().message, HasSubstr("repeat bytes"));
  EXPECT_THAT(Blobs(), IsEmpty());
}

TEST_F(CompactTest, AChangedSourceIsRefusedAndLeavesNothingNew) {
  const StepRecord record = Publish();
  fs::resize_file(pieces_.PathOf(7), fs::file_size(pieces_.PathOf(7)) - 1);
  const auto refused = Compact(record);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kStale);
  EXPECT_THAT(refused.error().message, HasSubstr("rank7"));
  EXPECT_THAT(Blobs(), IsEmpty());
}

TEST_F(CompactTest, ACollectionTakesWhatNoStepNeeds) {
  const auto report = Compact(Publish());
  ASSERT_TRUE(report);
  ASSERT_TRUE(store_->Collect({}));
  EXPECT_THAT(Blobs(), SizeIs(1));
  const std::string partial =
      StrCat(store_->blobs(), "/", std::string(32, 'a'), ".partial-compact");
  fs::create_directory(partial);
  ASSERT_TRUE(store_->Remove(report->record));
  const auto collected = store_->Collect({});
  ASSERT_TRUE(collected) << collected.error().message;
  EXPECT_EQ(collected->directories, 2u);
  EXPECT_THAT(Blobs(), IsEmpty());
}

TEST_F(CompactTest, APackedFileIsForThoseWhoMayReadAllThatItIsMadeOf) {
  pieces_.Restrict(3, 0600);
  const auto report = Compact(Publish());
  ASSERT_TRUE(report) << report.error().message;
  struct stat info {};
  ASSERT_EQ(stat((report->directory + "/packed/00000.safetensors").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  if (geteuid() == 0) {
    EXPECT_EQ(info.st_uid, 1000u);
  }
}

}  // namespace
}  // namespace ckptfs
