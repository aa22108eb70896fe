// SPDX-License-Identifier: Apache-2.0
//
// The records by which daemons of several machines make one step of what the ranks of a
// job hand over to each of them:
//
//   prepared/<job>/ranks-<node>     which ranks of a job a daemon has; replaced
//   prepared/<job>/world            those of all daemons, as the one with rank 0 gathered them;
//                                   replaced
//   prepared/<lived>/<attempt>/part-<node>.<rank>   what one daemon has made durable of a save
//   prepared/<lived>/<attempt>/outcome   what becomes of that save: it is published or dropped
//   prepared/<lived>/<attempt>/done      the step that it became
//   nodes/<node>                    a daemon that works (node_presence.h); replaced
//
// <job> is the digest of run LF job, <lived> that of run LF job LF life; <attempt> a decimal
// number; <node> the random digest of one daemon's life, <rank> the first one of the part: a
// daemon has one part of a save, unless a rank came to it later.  Records that are not
// replaced are published if they are absent.  All are texts (core/records/record_text.h).
//
// Older builds had all records of a store in one folder, under flat names:
//
//   prepared/<lived>-<attempt>-<node>.<rank>, -outcome, -done; prepared/<job>-ranks-<node>
//
// A spool still names its parts so.  In a store, kLayoutMarks make such builds reclaim nothing.
//
// Thread safety: values and pure functions.
// Inputs are hostile: a record is refused unless all of it makes sense and it is the one that
// its name says.
// Units: bytes; mtime is nanoseconds since the epoch, and shown only.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/digest.h"
#include "core/base/result.h"

namespace ckptfs {

inline constexpr uint64_t kPreparedMaxBytes = uint64_t{256} << 20;
inline constexpr uint32_t kMaxPreparedWorld = 1u << 20;

// The key that tells the saves of all jobs apart.
struct AttemptName {
  std::string run;
  std::string job;
  uint64_t attempt = 0;
  Digest life = {};  // LifeOf all ranks; zero where all are one daemon's, or not known yet
  auto operator<=>(const AttemptName&) const = default;
};

struct PreparedRank {
  uint32_t rank = 0;
  uint64_t bytes = 0;          // of its file
  std::vector<Digest> chunks;  // of every kChunkBytes (core/blob/chunk_digests.h)
  // The digest of these digests, where the store has them in a file (core/blob/chunk_list.h): a
  // record that was read then lacks `chunks`.
  Digest chunk_list = {};
  bool operator==(const PreparedRank&) const = default;

  // True if these are the same rank's files with the same bytes, however their digests are said.
  bool IsSameAs(const PreparedRank& other) const;
};

// The part of a save that one daemon has made durable.
struct PreparedPart {
  AttemptName name;
  uint64_t step = 0;
  uint32_t world = 0;
  int64_t mtime_ns = 0;             // rank 0's is the step's
  std::vector<PreparedRank> ranks;  // ascending

  // Where the files of all ranks of this save lie, below the store's blobs.
  std::string Directory() const;
  std::string PathOf(uint32_t rank) const;
  // The part as it is told in a store, whose files have lists of chunks where they are long.
  PreparedPart WithChunkLists() const;
};

// The decision on a save: exactly one of these is ever published for it.
struct AttemptOutcome {
  AttemptName name;
  uint64_t step = 0;
  Digest node;                     // the node that decided
  std::optional<Digest> manifest;  // of the step that it becomes
  std::string dropped;             // or why it does not
};

struct AttemptDone {
  Digest node;
  std::string id;  // of the step
  Digest manifest;
};

// The ranks of a job that a daemon has.
struct NodeRanks {
  std::string run;
  std::string job;
  uint32_t world = 0;
  std::string host;
  std::map<uint32_t, uint64_t> ranks;  // with the random number of each one's life
  bool operator==(const NodeRanks&) const = default;
};

// The same only for the very same processes.  REQUIRES: all ranks of the world.
Digest LifeOf(const std::map<uint32_t, uint64_t>& ranks);

// A daemon's record of itself while it works.
struct NodePresence {
  uint64_t beat = 0;  // another number whenever it is said again
  std::string host;
  std::string boot;                // of its kernel
  uint64_t device = 0;             // st_dev of the store there
  std::vector<std::string> names;  // of objects and directories that it has in work
};

// The world of a job as the daemon with rank 0 has gathered it.
struct WorldRecord {
  std::string run;
  std::string job;
  uint32_t world = 0;
  Digest node;  // that daemon's
  struct Host {
    std::string name;
    std::map<uint32_t, uint64_t> ranks;  // as NodeRanks has them
    bool operator==(const Host&) const = default;
  };
  std::vector<Host> hosts;  // one for each daemon
  std::string refused;      // why these do not make one world; else empty
  bool operator==(const WorldRecord&) const = default;
};

// The parts of a name below prepared/; nothing if it is not one.
struct CommitName {
  enum class Kind { kPart, kOutcome, kDone, kRanks, kWorld };
  Kind kind = Kind::kPart;
  Digest job;
  uint64_t attempt = 0;     // of kPart, kOutcome and kDone
  Digest node;              // of kPart and kRanks
  uint32_t first_rank = 0;  // of kPart
};
inline constexpr std::string_view kPreparedFolder = "prepared";
inline constexpr std::string_view kNodesFolder = "nodes";
std::optional<CommitName> ParseCommitName(std::string_view path);
std::optional<CommitName> ParseFlatName(std::string_view path);
std::string PathOf(const CommitName& name);
// The folder of all attempts of a job's life, and of one of them.
std::string LifeFolder(const AttemptName& name);
std::string AttemptFolder(const AttemptName& name);
std::string JobFolder(std::string_view run, std::string_view job);
std::string PartName(const PreparedPart& part, const Digest& node);
std::string FlatPartName(const PreparedPart& part, const Digest& node);
std::string OutcomeName(const AttemptName& name);
std::string DoneName(const AttemptName& name);
std::string NodeRanksName(std::string_view run, std::string_view job, const Digest& node);
std::string WorldName(std::string_view run, std::string_view job);
std::string PresenceName(const Digest& node);

// Records under flat names that older builds cannot read, though they must not take them away: such
// a build says so and reclaims nothing.
std::array<std::string, 2> LayoutMarks();
std::string LayoutMarkText();
bool IsLayoutMark(const CommitName& flat);

std::string RenderPart(const PreparedPart& part);
std::string RenderOutcome(const AttemptOutcome& outcome);
std::string RenderDone(const AttemptDone& done);
std::string RenderNodeRanks(const NodeRanks& ranks);
std::string RenderWorld(const WorldRecord& world);
std::string RenderPresence(const NodePresence& presence);
// kDataLoss for what was not written so, kInvalid for what makes no sense, kUnsupported
// for a newer version.
Result<PreparedPart> ParsePart(std::string_view bytes, const CommitName& name);
Result<AttemptOutcome> ParseOutcome(std::string_view bytes, const CommitName& name);
Result<AttemptDone> ParseDone(std::string_view bytes);
Result<NodeRanks> ParseNodeRanks(std::string_view bytes, const CommitName& name);
Result<WorldRecord> ParseWorld(std::string_view bytes, const CommitName& name);
Result<NodePresence> ParsePresence(std::string_view bytes);

// "0, 2-3 and 5 more".
std::string RanksText(const std::set<uint32_t>& ranks);

}  // namespace ckptfs
