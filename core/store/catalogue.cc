// SPDX-License-Identifier: Apache-2.0
#include "core/store/catalogue.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>

#include "core/base/descriptor.h"
#include "core/base/trust.h"

namespace ckptfs {
namespace {

constexpr int kBusyMilliseconds = 2000;

struct CloseConnection {
  void operator()(sqlite3* connection) const { sqlite3_close_v2(connection); }
};
struct FinalizeStatement {
  void operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }
};
using Connection = std::unique_ptr<sqlite3, CloseConnection>;
using Statement = std::unique_ptr<sqlite3_stmt, FinalizeStatement>;

// The file is there, nobody else's, and for our eyes only: the texts of records
// are as private as the records.
bool PrepareFile(const std::string& path, bool create) {
  // Only what is new is opened here: closing a descriptor of a database that is
  // in use would end its locks.
  if (create) {
    (void)OpenDescriptor(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
  }
  struct stat status;
  if (lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return false;
  if (!WhyNotTrusted(status, Believed::kOwnUserOrRoot).empty()) return false;
  if ((status.st_mode & 077) != 0) (void)chmod(path.c_str(), 0600);
  return true;
}

Connection Connect(const std::string& path, int flags) {
  if (!PrepareFile(path, (flags & SQLITE_OPEN_CREATE) != 0)) return nullptr;
  sqlite3* raw = nullptr;
  const int code = sqlite3_open_v2(path.c_str(), &raw, flags | SQLITE_OPEN_NOMUTEX, nullptr);
  Connection connection(raw);
  if (code != SQLITE_OK) return nullptr;
  sqlite3_busy_timeout(raw, kBusyMilliseconds);
  return connection;
}

Statement Prepare(sqlite3* connection, const char* sql) {
  sqlite3_stmt* raw = nullptr;
  if (sqlite3_prepare_v2(connection, sql, -1, &raw, nullptr) != SQLITE_OK) return nullptr;
  return Statement(raw);
}

bool Execute(sqlite3* connection, const char* sql) {
  return sqlite3_exec(connection, sql, nullptr, nullptr, nullptr) == SQLITE_OK;
}

bool Bind(sqlite3_stmt* statement, int at, const std::string& text) {
  return sqlite3_bind_blob64(statement, at, text.data(), text.size(), SQLITE_TRANSIENT) ==
         SQLITE_OK;
}

std::string Column(sqlite3_stmt* statement, int at) {
  const auto* bytes = static_cast<const char*>(sqlite3_column_blob(statement, at));
  const int size = sqlite3_column_bytes(statement, at);
  return bytes == nullptr ? std::string() : std::string(bytes, static_cast<size_t>(size));
}

bool BelongsTo(sqlite3* connection, const std::string& store_id) {
  const Statement statement = Prepare(connection, "SELECT id FROM store");
  return statement != nullptr && sqlite3_step(statement.get()) == SQLITE_ROW &&
         Column(statement.get(), 0) == store_id;
}

bool Insert(sqlite3* connection, const RecordTexts& records) {
  const Statement statement =
      Prepare(connection, "INSERT OR IGNORE INTO records(name, body) VALUES(?1, ?2)");
  if (statement == nullptr) return false;
  for (const auto& [name, body] : records) {
    if (!Bind(statement.get(), 1, name) || !Bind(statement.get(), 2, body) ||
        sqlite3_step(statement.get()) != SQLITE_DONE) {
      return false;
    }
    sqlite3_reset(statement.get());
  }
  return true;
}

// Tables for `store_id`; those of another store are emptied.
bool Prepared(sqlite3* connection, const std::string& store_id) {
  if (!Execute(connection,
               "CREATE TABLE IF NOT EXISTS store(id BLOB);"
               "CREATE TABLE IF NOT EXISTS records(name BLOB PRIMARY KEY, body BLOB)")) {
    return false;
  }
  if (BelongsTo(connection, store_id)) return true;
  if (!Execute(connection, "DELETE FROM records; DELETE FROM store")) return false;
  const Statement statement = Prepare(connection, "INSERT INTO store(id) VALUES(?1)");
  return statement != nullptr && Bind(statement.get(), 1, store_id) &&
         sqlite3_step(statement.get()) == SQLITE_DONE;
}

// False if the file is not a usable database.
bool Add(const std::string& path, const std::string& store_id, const RecordTexts& records) {
  const Connection connection = Connect(path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE);
  if (connection == nullptr) return true;  // not writable: nothing to repair
  sqlite3* raw = connection.get();
  if (Execute(raw, "BEGIN IMMEDIATE") && Prepared(raw, store_id) && Insert(raw, records) &&
      Execute(raw, "COMMIT")) {
    return true;
  }
  const int code = sqlite3_errcode(raw);
  Execute(raw, "ROLLBACK");
  return code != SQLITE_CORRUPT && code != SQLITE_NOTADB && code != SQLITE_ERROR;
}

}  // namespace

RecordTexts LoadCatalogue(const std::string& path, const std::string& store_id) {
  RecordTexts records;
  const Connection connection = Connect(path, SQLITE_OPEN_READONLY);
  if (connection == nullptr || !BelongsTo(connection.get(), store_id)) return records;
  const Statement statement = Prepare(connection.get(), "SELECT name, body FROM records");
  if (statement == nullptr) return records;
  int code = SQLITE_ROW;
  while ((code = sqlite3_step(statement.get())) == SQLITE_ROW) {
    records.emplace(Column(statement.get(), 0), Column(statement.get(), 1));
  }
  return code == SQLITE_DONE ? records : RecordTexts{};
}

void DropCatalogue(const std::string& path) {
  for (const char* suffix : {"", "-journal", "-wal", "-shm"}) unlink((path + suffix).c_str());
}

void AddToCatalogue(const std::string& path, const std::string& store_id,
                    const RecordTexts& records) {
  if (Add(path, store_id, records)) return;
  DropCatalogue(path);
  Add(path, store_id, records);
}

}  // namespace ckptfs
