"""Tables, figures and a page of finished runs: ``python src/report.py 'roots=[logs]'
out=logs/report``.
"""

from gcfed.commands import report

if __name__ == "__main__":
    report()
